"""Overloads that write into tensors of the caller: held to the operator, and no operator is blamed for having one."""

from __future__ import annotations

import pytest
import torch

from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample
from tests.operators.contract.faulty_operators import WITHOUT_COMPILERS

_LIBRARY = torch.library.Library("outs", "DEF")
_TAG = getattr(torch.Tag, "out", None)
needs_tag = pytest.mark.skipif(_TAG is None, reason="this torch has no tag for out overloads")


def _with_out(name: str, times: int) -> Subject:
    """An operator that doubles, and its overload, which multiplies."""
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    _LIBRARY.define(f"{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(_TAG,) if _TAG else ())
    _LIBRARY.impl(name, lambda x: x.contiguous() * 2, "CPU")
    _LIBRARY.impl(f"{name}.out", lambda x, *, out: out.copy_(x * times), "CPU")
    torch.library.register_fake(f"outs::{name}", lambda x: x.new_empty(x.shape), lib=_LIBRARY)
    torch.library.register_fake(f"outs::{name}.out", lambda x, *, out: out, lib=_LIBRARY)
    return Subject(getattr(torch.ops.outs, name).default, tuple(Sample("", (torch.randn(n, 3),)) for n in (2, 4)))


@needs_tag
def test_an_overload_with_another_answer_is_found_with_the_smallest_call():
    (finding,) = check_operator(_with_out("wrong", 3), ["out-overload"]).findings
    assert "outs.wrong.out must write what the operator returns" in finding.message
    assert "torch.randn(1, 1)" in finding.call
    exec(finding.call, {"torch": torch})
    assert not check_operator(_with_out("right", 2), ["out-overload"]).findings


@needs_tag
def test_an_operator_is_not_blamed_for_how_torch_calls_its_overload():
    subject = _with_out("called", 2)
    for _ in range(2):  # what the first check compiled without the overload does not answer for the second
        findings = check_operator(subject, ["compiles"]).findings
        if torch.__version__ >= (2, 14):  # it calls the overload with sizes that vary, too
            assert not findings
            continue
        (finding,) = findings
        assert finding.severity is Severity.doubtful
        assert "torch.compile calls outs.called.out in the operator's place" in finding.message


def test_an_overload_that_returns_what_it_writes_to_is_not_broken():
    overload = _with_out("written", 2).overload.overloadpacket.out
    calls = tuple(Sample("", (torch.randn(n, 3),), {"out": torch.empty(n, 3)}) for n in (2, 4))
    found = check_operator(Subject(overload, calls), WITHOUT_COMPILERS).findings
    assert [f.severity for f in found if f.check == "schema"] == [Severity.doubtful]
    assert not [f for f in found if f.severity is Severity.broken], found
