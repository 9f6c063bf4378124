"""Gradients: true, of the right form, for any strides, for each argument alone, and honest about second derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from exportkit.operators.contract.check_values import reference_of, tolerance
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import difference, shortened
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import EXPANDED, REVERSED, SPACED
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.sample import Sample, tensors, upcast


@dataclass(frozen=True)
class Differentiable:
    """The floating outputs of a call, as a function of the arguments that get gradients."""

    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    function: Callable[..., tuple[Tensor, ...]]

    def outputs(self) -> list[Tensor]:
        """Returns the outputs that have gradients."""
        return [o for o in self.function(*self.inputs) if o.requires_grad]

    def gradients(self, upstream: list[Tensor] | None = None, of: int | None = None) -> list[Tensor | None]:
        """Returns the gradients of the outputs' sum, weighed by `upstream`, for all arguments or one of them."""
        own = Differentiable(
            self.names,
            tuple(t.detach().requires_grad_(of in (None, i)) for i, t in enumerate(self.inputs)),
            self.function,
        )
        outputs = own.outputs()
        wanted = [t for t in own.inputs if t.requires_grad]
        ones = [torch.ones_like(o) for o in outputs]
        return list(torch.autograd.grad(outputs, wanted, upstream or ones, allow_unused=True))


def differentiable(trial: Trial, call: Sample, function: Callable[..., Any] | None = None) -> Differentiable:
    """Returns a call, of the operator or another function, as a function of the arguments that have gradients.

    It raises NotApplicable if no argument has one, or if the values are not finite.
    """
    if trial.subject.is_mutable:
        raise NotApplicable("the operator writes to an argument")
    if not all(bool(torch.isfinite(t).all()) for t in call.tensors):
        raise NotApplicable("the values are not finite")
    bound = trial.bound(call)
    names = tuple(n for n in _names(trial, call) if isinstance(bound.get(n), Tensor))
    called = function or trial.subject.function

    def of(*values: Tensor) -> tuple[Tensor, ...]:
        trial.count += 1
        results = called(**(bound | dict(zip(names, values))))
        return tuple(r for r in _flat(results) if r.is_floating_point())

    inputs = tuple(bound[n].detach().clone(memory_format=torch.preserve_format).requires_grad_() for n in names)
    return Differentiable(names, inputs, of)


def _flat(results: Any) -> list[Tensor]:
    parts = results if isinstance(results, list | tuple) else (results,)
    return [part for part in parts if isinstance(part, Tensor)]


def _names(trial: Trial, call: Sample) -> tuple[str, ...]:
    """Returns the arguments with gradients, by the SPEC or by trying."""
    spec = trial.subject.spec
    if spec is not None:
        if not spec.differentiable:
            raise NotApplicable("the SPEC names no argument with a gradient")
        return spec.differentiable
    return trial.remembered("differentiable", None, lambda: _tried(trial, call))


def _tried(trial: Trial, call: Sample) -> tuple[str, ...]:
    bound = trial.bound(call)
    floating = {n: v for n, v in bound.items() if isinstance(v, Tensor) and v.is_floating_point()}
    leaves = {n: v.detach().clone().requires_grad_() for n, v in floating.items()}
    outputs = [o for o in _flat(trial.subject.function(**(bound | leaves))) if o.requires_grad]
    if not outputs:
        raise NotApplicable("no output has a gradient")
    try:
        ones = [torch.ones_like(o, memory_format=torch.contiguous_format) for o in outputs]
        grads = torch.autograd.grad(outputs, list(leaves.values()), ones, allow_unused=True)
    except RuntimeError as error:
        raise NotApplicable(f"it has no gradient: {first_line(error)}") from None
    if names := tuple(n for n, g in zip(leaves, grads) if g is not None):
        return names
    raise NotApplicable("no argument has a gradient")


_GRADCHECK_ELEMENTS = 600
"""gradcheck calls the operator twice for each element."""

LEAVES = "args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]"
_SHOWN = f"{LEAVES}\ntorch.autograd.gradcheck({{op}}, args)"


def small_enough(call: Differentiable) -> bool:
    """Returns whether numeric derivatives are affordable."""
    return 0 < sum(t.numel() for t in call.inputs) <= _GRADCHECK_ELEMENTS


@ContractCheck(
    "gradcheck",
    "Compare the backward formula with the derivative of the forward one. If it is another on purpose, as in a "
    "straight-through estimator, say so where users read it.",
    order=70,
    dtypes="float64",
    unless=("opcheck-autograd", "determinism", "mutation", "aliasing"),
)
def gradcheck(trial: Trial, call: Sample) -> Problem | None:
    """Gradients equal numeric derivatives in float64, or in float32 where there is no float64."""
    own = differentiable(trial, call)
    if not small_enough(own):
        raise NotApplicable("the call is too large for numeric derivatives")
    if call.floating_dtype != torch.float64:
        return _gradcheck_in_float32(trial, call, own)
    try:
        torch.autograd.gradcheck(own.function, own.inputs, eps=1e-6, atol=1e-5, rtol=1e-4)
    except GradcheckError as error:
        return Problem(
            f"Gradients must equal numeric derivatives in float64, but {shortened(str(error))}.", shown=_SHOWN
        )
    return None


def _gradcheck_in_float32(trial: Trial, call: Sample, own: Differentiable) -> Problem | None:
    """Says what is wrong at each of some points and steps: at a kink, a difference is no derivative."""

    def single(*values: Tensor) -> list[Tensor]:
        return [o.double() for o in own.function(*(v.float() for v in values))]

    for factor, step in itertools.product((1.0, 0.77, 1.31), (1e-2, 2.5e-3)):
        inputs = [(t.detach().double() * factor).requires_grad_() for t in own.inputs]
        try:
            near = single(*(t * (1 + torch.finfo(torch.float32).eps * torch.randn_like(t)) for t in inputs))
            pairs = zip(near, single(*inputs))
            noise = max((float((a - b).abs().nan_to_num(0.0).max()) for a, b in pairs if a.numel()), default=0.0)
            torch.autograd.gradcheck(single, inputs, eps=step, atol=1e-5 + 20 * noise / step, rtol=0.03)
        except GradcheckError as error:
            said = shortened(str(error))
            continue
        except RuntimeError as error:
            raise NotApplicable(f"the operator refuses other values: {first_line(error)}") from None
        return None
    return Problem(f"Gradients must equal numeric derivatives, in float32 far from noise, but {said}.", shown=_BACKWARD)


@ContractCheck(
    "gradient-reference",
    "Correct the backward kernel.",
    order=71,
    unless=("opcheck-autograd", "determinism", "reference", "gradcheck"),
)
def gradient_reference(trial: Trial, call: Sample) -> Problem | None:
    """Gradients in each dtype equal those of the reference in float64."""
    reference = reference_of(trial)
    own = differentiable(trial, call)
    exact = differentiable(trial, upcast(call), reference)
    outputs = own.outputs()
    upstream = [torch.randn_like(o) for o in outputs]
    actual = torch.autograd.grad(outputs, own.inputs, upstream)
    expected = torch.autograd.grad(exact.outputs(), exact.inputs, [u.double() for u in upstream])
    rtol, atol = tolerance(trial, own.inputs[0].dtype)
    for name, a, e in zip(own.names, actual, expected):
        scale = max(1.0, float(e.abs().max())) if e.numel() else 1.0
        if text := difference(a.double(), e, 4 * rtol, 4 * atol * scale):
            return Problem(
                f"The gradient of {name} must equal the reference's in float64, but {text}.", shown=_BACKWARD
            )
    return None


_BACKWARD = LEAVES + (
    "\nresult = {op}(*args)\n"
    "sum(r.sum() for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad).backward()\n"
    "print([a.grad for a in args if isinstance(a, torch.Tensor)])"
)


@ContractCheck(
    "gradient-form",
    "Return each gradient with the shape, dtype and device of its argument. torch casts a gradient of another dtype "
    "silently, which costs memory and time.",
    order=71,
    dtypes="some",
    most=6,
    unless=("opcheck-autograd", "mutation", "aliasing"),
)
def gradient_form(trial: Trial, call: Sample) -> Problem | None:
    """A backward returns gradients with the shape, dtype and device of their arguments, before torch casts them."""
    own = differentiable(trial, call, trial.subject.overload)
    outputs = own.outputs()
    raw = _from_backward(trial, call, own, outputs)
    for name, value in zip(own.names, own.inputs):
        gradient = raw.get(name)
        if gradient is not None and _form(gradient) != _form(value):
            return Problem(
                f"The gradient of {name} must have its form, {_form(value)}, but the backward returns "
                f"{_form(gradient)}.",
                severity=Severity.doubtful if gradient.shape == value.shape else Severity.broken,
                shown=_BACKWARD,
            )
    return None


def _from_backward(trial: Trial, call: Sample, own: Differentiable, outputs: list[Tensor]) -> dict[str, Tensor]:
    """Returns the gradients as the backward function returns them."""
    overload = trial.subject.overload
    nodes: set[Any] = {o.grad_fn for o in outputs}
    results = tensors(trial.run(Sample("", (), trial.bound(call) | dict(zip(own.names, own.inputs))), overload))
    if len(nodes) != 1 or None in nodes or len(results) != len(overload._schema.returns):
        raise NotApplicable("the outputs do not come from one backward function")
    node, given = nodes.pop(), [torch.ones_like(r) if r.requires_grad else torch.zeros_like(r) for r in results]
    if not hasattr(node, "apply"):  # a function in C++: what it returns is in the order of what follows it
        names = {id(value): name for name, value in zip(own.names, own.inputs)}
        returned = node(*given)
        followers = [names.get(id(getattr(following, "variable", None))) for following, _ in node.next_functions]
    else:  # torch.autograd.Function returns a gradient, or None, for each argument
        returned = node.apply(*given)
        followers = [name if name in own.names else None for name in trial.bound(call)]
    returned = returned if isinstance(returned, tuple) else (returned,)
    return {name: g for name, g in zip(followers, returned) if name is not None and isinstance(g, Tensor)}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} on {tensor.device.type}"


@ContractCheck(
    "gradient-strides",
    "Call contiguous() on the gradient that comes in, and on saved tensors: `.sum().backward()` sends a gradient with "
    "strides 0.",
    order=72,
    dtypes="first",
    most=5,
    unless=("opcheck-autograd", "determinism", "mutation", "aliasing", "strides"),
)
def gradient_strides(trial: Trial, call: Sample) -> Problem | None:
    """Gradients depend on values, not on where inputs and incoming gradients lie."""
    own = differentiable(trial, call)
    outputs = own.outputs()
    plain = [torch.randn_like(o, memory_format=torch.contiguous_format) for o in outputs]
    for layout in (REVERSED, SPACED, EXPANDED):
        laid = [layout.apply(u) for u in plain]
        expected = own.gradients([u.contiguous() for u in laid])
        for name, a, e in zip(own.names, own.gradients(laid), expected):
            rtol, atol = tolerance(trial, own.inputs[0].dtype)
            if a is not None and e is not None and (text := difference(a, e, rtol, atol)):
                return Problem(
                    f"The gradient of {name} must not depend on strides, but if the gradient that comes in has "
                    f"{layout.name}, {text}.",
                    shown=_BACKWARD,
                )
    return None


@ContractCheck(
    "gradient-alone",
    "Look at ctx.needs_input_grad in the backward: save and compute what is asked for, and no less.",
    order=72,
    dtypes="float64",
    most=3,
    unless=("opcheck-autograd", "determinism", "mutation", "aliasing"),
)
def gradient_alone(trial: Trial, call: Sample) -> Problem | None:
    """Each gradient can be asked for alone, and is the same as with the others but for rounding.

    A kernel for one gradient may add up in another order than the kernel for all.
    """
    own = differentiable(trial, call)
    if len(own.names) < 2:
        raise NotApplicable("one argument has a gradient")
    everything = own.gradients()
    for index, name in enumerate(own.names):
        (alone,) = own.gradients(of=index)
        together = everything[index]
        if alone is None or together is None:
            continue
        if text := difference(alone, together, *tolerance(trial, alone.dtype)):
            return Problem(f"The gradient of {name} must be the same alone and with the others, but {text}.")
    return None


@ContractCheck(
    "second-derivative",
    "Give the gradient operator a backward, or make it raise an error, with torch.library.register_autograd.",
    order=73,
    dtypes="float64",
    most=2,
    unless=("opcheck-autograd", "determinism", "mutation", "aliasing", "gradcheck", "gradient-form"),
)
def second_derivative(trial: Trial, call: Sample) -> Problem | None:
    """Second derivatives are true, or asking for one is an error. A SPEC says which."""
    if call.floating_dtype != torch.float64:
        raise NotApplicable("it takes no float64")
    own = differentiable(trial, call)
    if not small_enough(own) or sum(t.numel() for t in own.inputs) > _GRADCHECK_ELEMENTS // 4:
        raise NotApplicable("the call is too large for numeric derivatives")
    spec = trial.subject.spec
    if spec is not None and not spec.second_order:
        return _refused(own)
    try:
        # A product with itself, or an operator that is linear would have second derivatives of zero.
        torch.autograd.gradgradcheck(lambda *values: [o.square() for o in own.function(*values)], own.inputs)
    except GradcheckError as error:
        return Problem(f"Second derivatives must be true, or asking for one an error, but {shortened(str(error))}.")
    except RuntimeError as error:
        if spec is not None:
            return Problem(f"The SPEC promises second derivatives, but they fail: {first_line(error)}.")
    return None


def _refused(own: Differentiable) -> Problem | None:
    outputs = own.outputs()
    upstream = [torch.ones_like(o, requires_grad=True) for o in outputs]
    first = torch.autograd.grad(outputs, own.inputs, upstream, create_graph=True)
    try:
        torch.autograd.grad([g.sum() for g in first], [*own.inputs, *upstream], allow_unused=True)
    except RuntimeError as error:
        if "second derivatives" in str(error):
            return None
        return Problem(
            f'The error for a second derivative must say "second derivatives", but it is: {first_line(error)}.'
        )
    return Problem("The SPEC promises no second derivatives, but asking for one is not an error.")
