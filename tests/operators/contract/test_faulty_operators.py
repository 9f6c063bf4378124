"""The contract finds each fault, by the check that is meant to, with the smallest call; and honest twins pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from exportkit.errors import UsageError
from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample
from tests.operators.contract.faulty_operators import FAULTS, HONEST, WITHOUT_COMPILERS, Fault, operator

MAY_RAISE = {"empty"}
"""Checks whose code raises the error that it shows."""


@pytest.mark.slow_but("hidden*", "race", "no fake", "non-deter*", "writing*")
@pytest.mark.parametrize("lie", [pytest.param(lie, id=name) for name, lie in FAULTS.items()])
def test_a_lie_is_found_by_the_check_that_is_meant_to_with_the_smallest_call(lie: Fault):
    report = check_operator(lie.subject, [*WITHOUT_COMPILERS, lie.check])
    assert [f.check for f in report.findings] == [lie.check], report.findings
    (finding,) = report.findings
    assert finding.call is not None
    assert lie.smallest in finding.call, finding.call
    if lie.check not in MAY_RAISE:
        exec(finding.call, {"torch": torch})


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_operator_passes_every_check(name: str):
    report = check_operator(HONEST[name])
    assert not report.findings, report.findings


def test_what_one_check_found_is_not_found_again_by_others():
    report = check_operator(FAULTS["non-determinism"].subject)
    assert [f.check for f in report.findings] == ["determinism"]
    assert report.skipped["batch"] == "determinism found a reason for it to fail"


def test_without_a_reference_laundered_nan_is_doubtful_and_found_by_its_influence():
    subject = dataclasses.replace(FAULTS["NaN laundering"].subject, reference=None)
    (finding,) = check_operator(subject, ["nan"]).findings
    assert finding.severity is Severity.doubtful
    assert "other numbers in its place show in output 0" in finding.message


def test_an_error_of_the_reference_is_said_to_be_its_own():
    subject = dataclasses.replace(HONEST["double"], reference=lambda x: x[1 // 0])
    (finding,) = check_operator(subject, ["reference"]).findings
    assert "the reference raises ZeroDivisionError: " in finding.message


def test_a_check_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UsageError, match=r"(?s)no checks colour.*determinism"):
        check_operator(HONEST["double"], ["colour"])


def test_the_callers_random_state_stays_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_operator(HONEST["double"], ["reference", "determinism"])
    assert torch.equal(torch.rand(3), expected)


def test_lists_of_tensors_are_called_and_not_traced_with_sizes_that_vary():
    def fake(xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0].new_empty((sum(x.shape[0] for x in xs), *xs[0].shape[1:]))

    joined = operator("joined", lambda xs: torch.cat([x * 2 for x in xs]), fake, "(Tensor[] xs) -> Tensor")
    calls = tuple(Sample(f"{rows} rows", ([torch.randn(rows, 3), torch.randn(2, 3)],)) for rows in (2, 3, 5))
    report = check_operator(Subject(joined, calls), ["exports", "autocast"])
    assert report.findings == ()
    assert "list of tensors" in report.skipped["exports"]
    assert set(report.passed) == {"autocast"}
