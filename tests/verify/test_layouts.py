"""Inputs in every layout: a package takes what eager takes, and nobody minds that a program refuses what eager does."""

from __future__ import annotations

import pytest
import torch

from exportkit.runtime.loader import load
from exportkit.verify.layouts import LAYOUTS, laid_out
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.verify.layout_models import Rotated


def test_a_package_that_sees_pairs_as_complex_numbers_passes_in_every_layout() -> None:
    report = verify(artifact("rotated"), VerifyOptions(against="cases"))
    assert [check.verdict.message for check in report.checks if check.failed] == []
    assert [check.beside for check in report.checks] == [1, 1, 1, 1]  # calls in another layout


def test_a_program_may_refuse_a_layout_which_eager_refuses_too() -> None:
    report = verify(artifact("rotated-program"), VerifyOptions(against="cases"))
    assert [check.verdict.message for check in report.checks if check.failed] == []
    assert len(report.checks) == 4


def test_eager_refuses_such_pairs_from_an_odd_element_on_and_the_package_copies() -> None:
    x, angles = torch.randn(2, 5, 8), torch.randn(5, 4)
    odd = laid_out(x, "from the second element")
    with pytest.raises(RuntimeError, match="storage_offset divisible by 2"):
        Rotated()(odd, angles)
    with load(artifact("rotated")) as model:
        for layout in LAYOUTS:
            torch.testing.assert_close(model(laid_out(x, layout), angles), Rotated()(x, angles))
