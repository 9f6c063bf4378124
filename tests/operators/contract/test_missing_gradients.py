"""An operator without a gradient is noted, in C++ as in Python; one whose author says that there is none is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exportkit.libraries import load_library
from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.findings import OperatorReport, Severity
from exportkit.operators.contract.operator_spec import OpSpec
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample
from tests.fixtures import stable_library

_LIBRARY = torch.library.Library("gradientless", "DEF")
_CALLS = (Sample("", (torch.randn(2, 3),)),)


def _below_autograd(kernel: Any) -> Any:
    def called(x: Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # as a kernel in C++
            return kernel(x)

    return called


def _operator(name: str, kernel: Any = lambda x: x * 2, schema: str = "(Tensor x) -> Tensor") -> str:
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, _below_autograd(kernel), "CPU")
    return f"gradientless::{name}"


def _report(name: str, spec: OpSpec | None = None, calls: tuple[Sample, ...] = _CALLS) -> OperatorReport:
    namespace, _, operator = name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), operator).default
    return check_operator(Subject(overload, calls, spec=spec), ["gradient-missing"])


def _asked(name: str) -> str:
    """What torch says to who asks for the gradient."""
    x = torch.randn(2, 3, requires_grad=True)
    namespace, _, operator = name.partition("::")
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(getattr(getattr(torch.ops, namespace), operator)(x).sum(), x)
    return str(raised.value)


def _said(name: str) -> str:
    (finding,) = _report(name).findings
    assert finding.severity is Severity.note
    assert "torch.library.register_autograd" in str(finding.hint)
    return finding.message


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_an_operator_without_an_autograd_kernel_is_noted_with_what_happens():
    name = _operator("plain")
    assert "loss.backward() leaves out what goes through the operator, with a warning only" in _said(name)
    assert "appears to not have been used in the graph" in _asked(name)


def test_outputs_that_require_no_gradient_are_noted():
    name = _operator("fallen_through")
    _LIBRARY.impl("fallen_through", torch.library.fallthrough_kernel, "Autograd")
    assert "silently leaves out" in _said(name)
    assert "does not require grad" in _asked(name)


def test_a_custom_op_without_a_formula_is_noted_with_what_torch_says():
    @torch.library.custom_op("gradientless::in_python", mutates_args=())
    def _(x: Tensor) -> Tensor:
        return x * 2

    assert "no autograd formula was registered" in _said("gradientless::in_python")
    assert "no autograd formula was registered" in _asked("gradientless::in_python")


def test_an_operator_of_cpp_is_noted():
    load_library(stable_library.build(Path(__file__).parents[1] / "tools" / "floats.cpp"))
    calls = (Sample("", (torch.randn(2, 3), 0.5)),)
    (finding,) = _report("floats::as_double", calls=calls).findings
    assert finding.severity is Severity.note
    assert "No gradient is registered" in finding.message


def test_a_gradient_and_an_error_of_the_author_are_enough():
    name = _operator("with_gradient")
    torch.library.register_autograd(name, lambda ctx, grad: grad * 2, lib=_LIBRARY)
    assert _report(name).passed == ("gradient-missing",)

    def refuses(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("gradientless::refusing is for inference: call x * 2 to train")

    name = _operator("refusing")
    torch.library.register_autograd(name, refuses, lib=_LIBRARY)
    assert _report(name).passed == ("gradient-missing",)


@pytest.mark.parametrize(
    ("name", "kernel", "schema", "why"),
    [
        ("places", lambda x: x.argsort(), "(Tensor x) -> Tensor", "no call returns a floating tensor"),
        ("written_", lambda x: x.add_(1) and None, "(Tensor(a!) x) -> ()", "writes to an argument"),
    ],
)
def test_what_can_have_no_gradient_is_not_asked_for_one(name: str, kernel: Any, schema: str, why: str):
    report = _report(_operator(name, kernel, schema))
    assert not report.findings
    assert why in report.skipped["gradient-missing"]


def test_a_spec_says_that_there_is_none_or_is_held_to_what_it_promises():
    name = _operator("declared")
    overload = torch.ops.gradientless.declared
    fields: dict[str, Any] = {"namespace": "gradientless", "name": "declared", "samples": lambda *_: _CALLS}
    spec = OpSpec(**fields, wrapper=overload.default, reference=lambda x: x * 2)
    assert "the SPEC names no argument" in _report(name, spec).skipped["gradient-missing"]
    promising = OpSpec(**fields, wrapper=overload.default, reference=lambda x: x * 2, differentiable=("x",))
    (finding,) = _report(name, promising).findings
    assert finding.severity is Severity.broken
