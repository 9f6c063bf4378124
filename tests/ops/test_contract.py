"""Every operator keeps its SPEC: walked over device and dtype, so that a new operator is tested by existing."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from exportkit.ops import SPECS, OpSpec, Sample
from exportkit.ops.triton import SPECS as TRITON_SPECS

# B023 is silenced where assert_close calls the lambda at once, before the loop moves on.
pytestmark = pytest.mark.filterwarnings("ignore:.*was not in the expected format.*")

WALKED = sorted(SPECS.items()) + [(f"triton_{name}", spec) for name, spec in sorted(TRITON_SPECS.items())]


def pairs(only=lambda spec: True):
    return [pytest.param(spec, id=name) for name, spec in WALKED if only(spec)]


def with_dtypes(only=lambda spec: True):
    return [
        pytest.param(spec, dtype, id=f"{name}-{str(dtype)[6:]}")
        for name, spec in WALKED
        if only(spec)
        for dtype in spec.dtypes
    ]


def samples_of(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = list(spec.samples(device, dtype))
    assert samples, f"{spec.name} has no samples"
    return samples


def fresh(value: Any) -> Any:
    """A deep copy, so that a mutating operator cannot pass its effect from one call to the next."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(memory_format=torch.preserve_format), value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def widened(sample: Sample) -> Sample:
    """The same call with every floating tensor in float64."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, (sample.args, dict(sample.kwargs))
    )
    return Sample(sample.label, args, kwargs)


def is_mutable(spec: OpSpec) -> bool:
    return spec.overload._schema.is_mutable


def outcome(function: Any, sample: Sample) -> list[torch.Tensor]:
    """Everything the call produced: outputs, and its arguments if it writes to one."""
    args, kwargs = fresh((sample.args, dict(sample.kwargs)))
    return tensors(function(*args, **kwargs)) + tensors((args, kwargs))


def assert_close(spec: OpSpec, actual: list[torch.Tensor], expected: list[torch.Tensor], label: str) -> None:
    assert len(actual) == len(expected), label
    for a, e in zip(actual, expected):
        rtol, atol = spec.tolerance(e.dtype)
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{label}: {m}")


# --- the schema -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", pairs())
def test_wrapper_and_reference_have_the_schema_of_the_operator(spec: OpSpec):
    arguments = spec.overload._schema.arguments
    for function in (spec.wrapper, spec.reference):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters] == [a.name for a in arguments]
        for parameter, argument in zip(parameters, arguments):
            has_default = parameter.default is not inspect.Parameter.empty
            assert has_default == argument.has_default_value(), argument.name
            if has_default:
                default = parameter.default
                assert (list(default) if isinstance(default, tuple) else default) == argument.default_value


@pytest.mark.parametrize("spec", pairs())
def test_sizes_are_symbolic_in_the_schema(spec: OpSpec):
    """`int k` would specialise a dynamic size; `SymInt k` does not."""
    assert not re.search(r"\bint(\[\d*\])?\??\s+\w+", str(spec.overload._schema).partition("->")[0])


@pytest.mark.parametrize("spec", pairs())
def test_samples_cover_the_sizes_that_break_kernels(spec: OpSpec):
    """B = 1, 2 and 5 (a batch offset counted twice shows only from 2 on), and an empty tensor."""
    batches = {
        next(iter(t.shape), 1)
        for s in samples_of(spec, torch.device("cpu"), torch.float32)
        for t in tensors(s.args)[:1]
    }
    assert {0, 1, 2, 5} <= batches, batches


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "dtype"), with_dtypes())
def test_kernel_equals_reference(spec: OpSpec, dtype: torch.dtype, device: torch.device):
    for sample in samples_of(spec, device, dtype):
        assert_close(spec, outcome(spec.wrapper, sample), outcome(spec.reference, sample), sample.label)


@pytest.mark.parametrize(("spec", "dtype"), with_dtypes())
def test_kernel_equals_the_reference_in_float64(spec: OpSpec, dtype: torch.dtype, device: torch.device):
    """The accuracy of the result itself: a reference in the kernel's own dtype could share its error."""
    for sample in samples_of(spec, device, dtype):
        actual, exact = outcome(spec.wrapper, sample), outcome(spec.reference, widened(sample))
        assert_close(spec, actual, [e.to(a.dtype) for a, e in zip(actual, exact)], sample.label)


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between all elements and an offset."""
    if tensor.dim() == 0:
        return tensor
    padded = tensor.new_empty([2 * size + 1 for size in tensor.shape])
    view = padded[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def reversed_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the first dimension innermost."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Stride 0 along the batch, where all samples are made alike."""
    return tensor[:1].expand_as(tensor) if tensor.dim() and tensor.shape[0] > 1 else tensor


@pytest.mark.parametrize("layout", [spaced, reversed_strides, channels_last, expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", pairs(lambda spec: not spec.overload._schema.is_mutable))
def test_strides_do_not_change_the_answer(spec: OpSpec, layout: Any, device: torch.device):
    for sample in samples_of(spec, device, torch.float32):
        args, kwargs = pytree.tree_map_only(torch.Tensor, layout, (sample.args, dict(sample.kwargs)))
        actual = tensors(spec.wrapper(*args, **kwargs))
        plain = pytree.tree_map_only(torch.Tensor, lambda t: t.contiguous(), (args, kwargs))
        expected = tensors(spec.wrapper(*plain[0], **plain[1]))
        for a, e in zip(actual, expected):
            assert a.is_contiguous(), sample.label
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{sample.label}: {m}")  # noqa: B023


@pytest.mark.parametrize(("spec", "dtype"), with_dtypes())
def test_kernel_is_deterministic(spec: OpSpec, dtype: torch.dtype, device: torch.device):
    for sample in samples_of(spec, device, dtype):
        for first, second in zip(outcome(spec.wrapper, sample), outcome(spec.wrapper, sample)):
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("spec", "dtype"), with_dtypes(lambda spec: not spec.overload._schema.is_mutable))
def test_a_sample_does_not_depend_on_its_batch_mates(spec: OpSpec, dtype: torch.dtype, device: torch.device):
    """Bit for bit: each sample alone gives what it gives in the batch."""
    for sample in samples_of(spec, device, dtype):
        batch = next((t.shape[0] for t in tensors(sample.args) if t.dim()), 0)
        whole = tensors(spec.wrapper(*sample.args, **sample.kwargs))
        if batch < 2 or any(t.dim() == 0 or t.shape[0] != batch for t in whole):
            continue
        for index in range(batch):

            def alone(t: torch.Tensor, index: int = index, batch: int = batch) -> torch.Tensor:
                return t[index : index + 1] if t.dim() > 1 and t.shape[0] == batch else t

            args, kwargs = pytree.tree_map_only(torch.Tensor, alone, (sample.args, dict(sample.kwargs)))
            for a, e in zip(tensors(spec.wrapper(*args, **kwargs)), whole):
                torch.testing.assert_close(a[0], e[index], rtol=0, atol=0, equal_nan=True)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", pairs())
def test_kernel_and_fake_refuse_alike(spec: OpSpec, device: torch.device):
    """Same call, same words: by the kernel, on meta tensors and under a FakeTensorMode."""
    refusals = list(spec.refusals(device))
    assert refusals, f"{spec.name} refuses nothing"
    for refusal in refusals:
        with pytest.raises(RuntimeError, match=refusal.message) as by_kernel:
            spec.wrapper(*refusal.args, **refusal.kwargs)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
            args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (refusal.args, dict(refusal.kwargs)))
            with pytest.raises(RuntimeError, match=refusal.message) as by_fake:
                spec.wrapper(*args, **kwargs)
        first_line = str(by_kernel.value).splitlines()[0]
        assert str(by_fake.value).splitlines()[0] == first_line, refusal.label


@pytest.mark.cuda
@pytest.mark.parametrize("spec", pairs(lambda spec: len(spec.overload._schema.arguments) > 1))
def test_tensors_on_two_devices_are_refused(spec: OpSpec):
    sample = samples_of(spec, torch.device("cuda"), torch.float32)[0]
    if len(tensors(sample.args)) < 2:
        pytest.skip("one tensor argument")
    args = list(sample.args)
    last = max(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
    args[last] = args[last].cpu()
    with pytest.raises((RuntimeError, NotImplementedError), match="device"):
        spec.wrapper(*args, **sample.kwargs)


# --- torch's own checks -----------------------------------------------------------------------------------------------


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("spec", pairs())
def test_opcheck(spec: OpSpec, device: torch.device):
    samples = samples_of(spec, device, torch.float32)
    for number, sample in enumerate(samples):
        if any(t.isnan().any() for t in outcome(spec.wrapper, sample)):
            continue  # opcheck takes NaN for a difference
        args, kwargs = fresh((sample.args, dict(sample.kwargs)))
        # The last traces the operator with symbolic sizes, and finds the same for most samples.
        checks = OPCHECKS if number % 4 == 0 else OPCHECKS[:-1]
        torch.library.opcheck(spec.overload, args, kwargs, test_utils=checks)


def differentiable_inputs(spec: OpSpec, sample: Sample) -> tuple[list[str], list[torch.Tensor], Any]:
    names = [a.name for a in spec.overload._schema.arguments]
    bound = dict(zip(names, sample.args)) | dict(sample.kwargs)
    wanted = [n for n in spec.differentiable if isinstance(bound.get(n), torch.Tensor)]

    def call(*values: torch.Tensor) -> Any:
        results = spec.wrapper(**(bound | dict(zip(wanted, values))))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(r for r in results if r.is_floating_point())

    return wanted, [bound[n].detach().clone().requires_grad_() for n in wanted], call


@pytest.mark.parametrize("spec", pairs(lambda spec: bool(spec.differentiable)))
def test_gradcheck_in_float64(spec: OpSpec, device: torch.device):
    checked = 0
    for sample in samples_of(spec, device, torch.float64):
        _, inputs, call = differentiable_inputs(spec, sample)
        if not all(torch.isfinite(t).all() for t in tensors(sample.args)) or sum(t.numel() for t in inputs) > 600:
            continue
        assert torch.autograd.gradcheck(call, inputs, eps=1e-6, atol=1e-5, rtol=1e-4), sample.label
        checked += 1
    assert checked >= 2, "too few samples small enough for gradcheck"


@pytest.mark.parametrize(("spec", "dtype"), with_dtypes(lambda spec: bool(spec.differentiable)))
def test_gradients_equal_those_of_the_reference(spec: OpSpec, dtype: torch.dtype, device: torch.device):
    for sample in samples_of(spec, device, dtype):
        if not all(torch.isfinite(t).all() for t in tensors(sample.args)):
            continue
        names, inputs, call = differentiable_inputs(spec, sample)
        outputs = [o for o in call(*inputs) if o.requires_grad]
        upstream = [torch.randn_like(o) for o in outputs]
        actual = torch.autograd.grad(outputs, inputs, upstream)
        reference = OpSpec(**{**vars(spec), "wrapper": spec.reference})
        _, wide_inputs, call_reference = differentiable_inputs(reference, widened(sample))
        wide_outputs = [o for o in call_reference(*wide_inputs) if o.requires_grad]
        expected = torch.autograd.grad(wide_outputs, wide_inputs, [u.double() for u in upstream])
        rtol, atol = spec.tolerance(dtype)
        for name, a, e in zip(names, actual, expected):
            assert a.dtype == dtype, f"{sample.label}: gradient of {name} is {a.dtype}"
            scale = max(1.0, float(e.abs().max())) if e.numel() else 1.0
            torch.testing.assert_close(
                a.double(),
                e,
                rtol=4 * rtol,
                atol=4 * atol * scale,
                msg=lambda m: f"{sample.label}, {name}: {m}",  # noqa: B023
            )


@pytest.mark.parametrize("spec", pairs(lambda spec: len(spec.differentiable) > 1))
def test_each_gradient_can_be_asked_for_alone(spec: OpSpec, device: torch.device):
    sample = samples_of(spec, device, torch.float64)[0]
    names, inputs, call = differentiable_inputs(spec, sample)
    everything = torch.autograd.grad([o.sum() for o in call(*inputs) if o.requires_grad], inputs)
    for index, name in enumerate(names):
        alone = [t.detach().requires_grad_(i == index) for i, t in enumerate(inputs)]
        (gradient,) = torch.autograd.grad([o.sum() for o in call(*alone) if o.requires_grad], [alone[index]])
        torch.testing.assert_close(gradient, everything[index], rtol=0, atol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("spec", pairs(lambda spec: spec.second_order))
def test_gradgradcheck_in_float64(spec: OpSpec, device: torch.device):
    sample = samples_of(spec, device, torch.float64)[0]
    _, inputs, call = differentiable_inputs(spec, sample)
    # A product with itself, or an operator that is linear would have second derivatives of zero.
    assert torch.autograd.gradgradcheck(lambda *values: [o.square() for o in call(*values)], inputs)


@pytest.mark.parametrize("spec", pairs(lambda spec: bool(spec.differentiable) and not spec.second_order))
def test_second_derivatives_are_an_error_that_says_so(spec: OpSpec, device: torch.device):
    sample = samples_of(spec, device, torch.float64)[0]
    _, inputs, call = differentiable_inputs(spec, sample)
    outputs = [o for o in call(*inputs) if o.requires_grad]
    upstream = [torch.ones_like(o, requires_grad=True) for o in outputs]
    first = torch.autograd.grad(outputs, inputs, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad([g.sum() for g in first], [*inputs, *upstream], allow_unused=True)


# --- the compiler's route ---------------------------------------------------------------------------------------------


class Call(torch.nn.Module):
    """The operator as a module of its tensor arguments; everything else is constant."""

    def __init__(self, spec: OpSpec, sample: Sample) -> None:
        super().__init__()
        self.spec = spec
        names = [a.name for a in spec.overload._schema.arguments]
        self.bound = dict(zip(names, sample.args)) | dict(sample.kwargs)
        self.names = [n for n, v in self.bound.items() if isinstance(v, torch.Tensor)]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(fresh(self.bound[n]) for n in self.names)

    def forward(self, *values: torch.Tensor) -> Any:
        result = self.spec.wrapper(**(self.bound | dict(zip(self.names, values))))
        return values[self.names.index("out")] * 1 if result is None else result


@pytest.mark.parametrize("spec", pairs())
def test_compiles_without_graph_breaks(spec: OpSpec, device: torch.device):
    torch._dynamo.reset()
    sample = samples_of(spec, device, torch.float32)[0]
    call = Call(spec, sample)
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    assert_close(spec, tensors(compiled(*call.inputs())), tensors(call(*call.inputs())), sample.label)


@pytest.mark.parametrize("spec", pairs(lambda spec: bool(spec.differentiable)))
def test_training_compiles_without_graph_breaks(spec: OpSpec, device: torch.device):
    torch._dynamo.reset()
    _, inputs, call = differentiable_inputs(spec, samples_of(spec, device, torch.float32)[0])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad([o.sum() for o in call(*inputs) if o.requires_grad], inputs)
    actual = torch.autograd.grad([o.sum() for o in compiled(*inputs) if o.requires_grad], inputs)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("spec", pairs())
def test_exports_with_dynamic_sizes(spec: OpSpec, device: torch.device):
    """One export serves every sample of the same ranks and constants."""
    assert spec.dynamic, f"{spec.name} names no dynamic dimension"
    sample = samples_of(spec, device, torch.float32)[0]
    call = Call(spec, sample)
    shapes = tuple(dict.fromkeys(spec.dynamic.get(name, {}), torch.export.Dim.DYNAMIC) for name in call.names)
    program = torch.export.export(call, call.inputs(), dynamic_shapes=(shapes,)).run_decompositions()
    assert any(node.target is spec.overload or is_mutable(spec) for node in program.graph.nodes)
    module, checked = program.module(), 0
    for other in samples_of(spec, device, torch.float32):
        again = Call(spec, other)
        constants = {n: v for n, v in again.bound.items() if n not in again.names}
        same = constants == {n: v for n, v in call.bound.items() if n not in call.names}
        static = [
            [b.bound[n].dim(), *(s for d, s in enumerate(b.bound[n].shape) if d not in spec.dynamic.get(n, {}))]
            for b in (call, again) for n in b.names
        ]  # fmt: skip
        half = len(static) // 2
        if not same or again.names != call.names or static[:half] != static[half:]:
            continue
        if any(again.bound[n].shape[d] < 2 for n in again.names for d in spec.dynamic.get(n, {})):
            continue
        assert_close(spec, tensors(module(*again.inputs())), tensors(again(*again.inputs())), other.label)
        checked += 1
    assert checked
