"""Eager's answers are held against the sizes of the traced program when a case is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exportkit.errors import ExportError, OperatorNotExportableError
from exportkit.export.call_signature import describe_call
from exportkit.export.cases import record_case
from exportkit.ops.muladd import muladd
from exportkit.package.manifest import OutputTolerance, Size, TensorOutput

ROWS = TensorOutput(
    name="y",
    dtype="float32",
    shape=(Size(dimension="rows"), 5),
    tolerance=OutputTolerance(rtol=0, atol=0),
)


class AtMostSix(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return muladd(x[:6], x[:6], 1.0)


def record(rows: int) -> None:
    model, x = AtMostSix(), torch.ones(rows, 5)
    record_case(model, describe_call(model, (x,), {}), {"rows": rows}, [ROWS], ["y"])


def test_sizes_that_fit_are_recorded() -> None:
    record(6)


def test_another_size_than_the_traced_one_is_named_with_both() -> None:
    with pytest.raises(ExportError, match=r"`y` has shape \[6, 5\] at rows=16; the traced program says \[16, 5\]"):
        record(16)


def test_an_operator_whose_fake_is_wrong_at_these_sizes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(operator: object, at: str, args: object, kwargs: object, result: Tensor) -> None:
        raise OperatorNotExportableError(f"the fake kernel of {operator} is wrong for {list(result.shape)}")

    monkeypatch.setattr("exportkit.export.preflight._check_fake", lies)
    with pytest.raises(OperatorNotExportableError, match=r"arr_coc.muladd.* is wrong for \[6, 5\]"):
        record(16)
