"""A call as a differentiable function of its floating tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.sample import Sample


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
