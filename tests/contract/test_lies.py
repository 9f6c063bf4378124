"""The contract finds each planted lie, by the check that is meant to, with the smallest call; and honest twins pass."""

from __future__ import annotations

import pytest
import torch

from exportkit.contract.check import check_operator
from exportkit.contract.definition import checks
from tests.contract.lies import HONEST, LEAKED, TEN, Lie

COMPILERS = {"compiles", "training-compiles", "exports", "opcheck-dynamic"}
WITHOUT_COMPILERS = [name for name in checks() if name not in COMPILERS]
"""What the compiler finds is tested apart: it takes seconds for each operator."""


@pytest.mark.parametrize("lie", [pytest.param(lie, id=name) for name, lie in TEN.items()])
def test_a_lie_is_found_by_the_check_that_is_meant_to_with_the_smallest_call(lie: Lie):
    report = check_operator(lie.subject, WITHOUT_COMPILERS)
    LEAKED.clear()
    assert [f.check for f in report.findings] == [lie.check], report.findings
    (finding,) = report.findings
    assert finding.call is not None
    assert lie.smallest in finding.call, finding.call
    exec(finding.call, {"torch": torch})


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_operator_passes_every_check(name: str):
    report = check_operator(HONEST[name])
    assert not report.findings, report.findings
