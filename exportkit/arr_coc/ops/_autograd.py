"""Registration of gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FOR_INFERENCE = "is for inference and has no derivative: train with its parts instead, "


def register_gradient(name: str, gradient: Callable[..., Any], **constants: Any) -> None:
    """Registers the gradient of `arr_coc::<name>`.

    Only the operator's first result gets a gradient. The others are there for `gradient`. The names of its parameters
    say what it gets: `grad` is the first result's gradient, `need_x` says whether that of `x` is needed, and every
    other name is an argument of the operator or one of its results, or a constant. A result without a name in the
    schema is `output`. It returns the gradients of each `x` with a `need_x`, in this order; without any `need_x`, the
    gradient of the first argument.
    """
    schema = getattr(torch.ops.arr_coc, name).default._schema
    values = [*schema.arguments, *schema.returns]
    names = [value.name or "output" for value in values]
    parameters = list(inspect.signature(gradient).parameters)
    needs = [p for p in parameters if p.startswith("need_")]
    kept = [p for p in parameters if p in names and p != "grad"]  # an argument `grad` is not kept
    tensors = [p for p in kept if "Tensor" in str(values[names.index(p)].type)]
    numbers = [p for p in kept if p not in tensors]
    # Places instead of names, because these run in every training step.
    tensors_at, numbers_at = ([names.index(p) for p in saved] for saved in (tensors, numbers))
    targets = [names.index(p.removeprefix("need_")) for p in needs]
    given = ["grad", *tensors, *numbers, *needs, *constants]
    given_at = [given.index(p) for p in parameters]
    nothing = (None,) * len(schema.arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = (*inputs, *output) if isinstance(output, tuple) else (*inputs, output)
        ctx.numbers = [values[place] for place in numbers_at]
        ctx.save_for_backward(*[values[place] for place in tensors_at])
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return nothing
        asked = ctx.needs_input_grad  # without arguments that were left out
        needed = [place < len(asked) and asked[place] for place in targets]
        given = (grad, *ctx.saved_tensors, *ctx.numbers, *needed, *constants.values())
        gradients = gradient(*[given[place] for place in given_at])
        if not targets:
            return gradients, *nothing[1:]
        found = list(nothing)
        for place, need, of_place in zip(targets, needed, gradients):
            found[place] = of_place if need else None
        return tuple(found)

    torch.library.register_autograd(f"arr_coc::{name}", backward, setup_context=setup_context)


def register_no_derivative(name: str, reason: str, namespace: str = "arr_coc") -> None:
    """Makes requesting a gradient of an operator an error. Without a rule torch only warns, and the gradient is None.

    The reason says why there is none, and what to do instead.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{namespace}::{name} {reason}")

    torch.library.register_autograd(f"{namespace}::{name}", backward)


def register_no_second_derivative(name: str, forward: str | None = None, namespace: str = "arr_coc") -> None:
    """Makes differentiating the gradient operator `name` of `forward` an error. None: `name` without "_grad"."""
    of = forward or name.removesuffix("_grad")
    reason = f"has no derivative: second derivatives of {namespace}::{of} are not supported; differentiate its"
    register_no_derivative(name, f"{reason} reference instead", namespace)
