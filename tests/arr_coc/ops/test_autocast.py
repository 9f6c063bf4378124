"""Every operator keeps its SPEC's rule for mixed dtypes under torch.autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exportkit.arr_coc.ops import OpSpec
from exportkit.operators.contract.sample import tensors
from tests.arr_coc.ops.walked_specs import Call, fresh, is_mutable, outcome, pairs, samples_of

HALVES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.bfloat16, torch.float16)]


def mixed(spec: OpSpec, device: torch.device, half: torch.dtype, first: bool) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """A call and its tensors, of which every other floating one is half precision: the first, or the second."""
    call = Call(spec, samples_of(spec, device, torch.float32)[0])
    floating = [n for n in call.names if call.bound[n].is_floating_point()]
    halved = set(floating[0 if first else 1 :: 2])
    return call, tuple(fresh(call.bound[n]).to(half if n in halved else call.bound[n].dtype) for n in call.names)


def by_rule(spec: OpSpec, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors cast as the operator's rule has it."""
    dtypes = [v.dtype for v in values if v.is_floating_point()]
    rules = {"float32": torch.float32, "widest": max(dtypes, key=lambda d: d.itemsize), "first": dtypes[0]}
    return tuple(v.to(rules[spec.autocast]) if v.is_floating_point() else v for v in values)


@pytest.mark.parametrize("first", [True, False], ids=["first half", "second half"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("spec", pairs(lambda spec: spec.autocast is not None))
def test_autocast_computes_in_the_dtype_of_the_rule(spec: OpSpec, half: torch.dtype, first: bool, device: torch.device):
    call, values = mixed(spec, device, half, first)
    with torch.autocast(device.type, dtype=half):
        actual = tensors(call(*values))
    expected = tensors(call(*by_rule(spec, values)))
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spec", pairs(lambda spec: bool(spec.differentiable) and spec.autocast is not None))
def test_autocast_gives_each_gradient_in_its_arguments_dtype(spec: OpSpec, device: torch.device):
    call, values = mixed(spec, device, torch.bfloat16, first=True)

    def gradients(cast: Any) -> tuple[torch.Tensor, ...]:
        inputs = [v.detach().requires_grad_(n in spec.differentiable) for n, v in zip(call.names, values)]
        outputs = [o for o in tensors(call(*cast(inputs))) if o.requires_grad]
        wanted = [v for v in inputs if v.requires_grad]
        grads = torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs])
        assert [g.dtype for g in grads] == [v.dtype for v in wanted]
        return grads

    expected = gradients(lambda inputs: by_rule(spec, inputs))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        actual = gradients(lambda inputs: inputs)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("spec", pairs(lambda spec: spec.autocast is not None))
def test_integers_are_refused_under_autocast_as_they_are_outside(spec: OpSpec, device: torch.device):
    sample = samples_of(spec, device, torch.float32)[0]
    args = [a.long() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in sample.args]
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="must be float32"):
        spec.wrapper(*args, **sample.kwargs)


@pytest.mark.parametrize("spec", pairs(is_mutable))
def test_an_operator_that_would_write_to_a_copy_of_its_argument_has_no_rule(spec: OpSpec):
    assert spec.autocast is None


@pytest.mark.parametrize("spec", pairs(lambda spec: spec.autocast is None))
def test_without_a_rule_autocast_changes_nothing(spec: OpSpec, device: torch.device):
    for sample in samples_of(spec, device, torch.bfloat16):
        expected = outcome(spec.wrapper, sample)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            actual = outcome(spec.wrapper, sample)
        for a, e in zip(actual, expected):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow_but("cpu-softmax*", "cpu-triton_softmax*")
@pytest.mark.parametrize("spec", pairs(lambda spec: spec.autocast is not None))
def test_autocast_is_compiled_and_exported(spec: OpSpec, device: torch.device):
    torch._dynamo.reset()
    call, values = mixed(spec, device, torch.bfloat16, first=True)

    class Region(torch.nn.Module):
        def forward(self, *values: torch.Tensor) -> Any:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return call(*values)

    expected = tensors(Region()(*values))
    compiled = torch.compile(Region(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Region(), values).run_decompositions({}).module()
    for route in (compiled, exported):
        for a, e in zip(tensors(route(*values)), expected):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
