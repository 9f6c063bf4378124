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

    Only the operator's first result gets a gradient. The others are there for `gradient`.

    Args:
        name: The operator.
        gradient: Returns the gradients. The names of its parameters say what it gets: `grad` is the first result's
            gradient, `need_x` says whether that of `x` is needed, and every other name is an argument of the operator
            or one of its results. A result without a name in the schema is `output`. It returns the gradients of each
            `x` with a `need_x`, in this order; without any `need_x`, the gradient of the first argument.
        constants: Parameters of `gradient` that are always the same.
    """
    schema = getattr(torch.ops.arr_coc, name).default._schema
    inputs, results = schema.arguments, schema.returns
    names = [*(argument.name for argument in inputs), *(result.name or "output" for result in results)]
    tensors = {name for name, value in zip(names, [*inputs, *results]) if "Tensor" in str(value.type)}
    parameters = list(inspect.signature(gradient).parameters)
    kept_tensors = [p for p in parameters if p in tensors]
    kept_numbers = [p for p in parameters if p in names and p not in tensors]
    targets = {p: names.index(p.removeprefix("need_")) for p in parameters if p.startswith("need_")} or {"": 0}

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = dict(zip(names, (*inputs, *_tuple(output))))
        ctx.numbers = {name: values[name] for name in kept_numbers}
        ctx.save_for_backward(*(values[name] for name in kept_tensors))
        if len(results) > 1:
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(inputs)
        if grad is None:
            return tuple(found)
        needs = {p: ctx.needs_input_grad[place] for p, place in targets.items()}
        given = {"grad": grad, **dict(zip(kept_tensors, ctx.saved_tensors)), **ctx.numbers, **needs, **constants}
        gradients = gradient(*(given[p] for p in parameters))
        for place, need, of_place in zip(targets.values(), needs.values(), _tuple(gradients)):
            found[place] = of_place if need else None
        return tuple(found)

    torch.library.register_autograd(f"arr_coc::{name}", backward, setup_context=setup_context)


def _tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def register_no_derivative(name: str, reason: str, namespace: str = "arr_coc") -> None:
    """Makes requesting a gradient of an operator an error. Without a rule torch only warns, and the gradient is None.

    Args:
        name: The operator.
        reason: Why there is no gradient, and what to do instead.
        namespace: Its namespace.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{namespace}::{name} {reason}")

    torch.library.register_autograd(f"{namespace}::{name}", backward)


def register_no_second_derivative(name: str, forward: str | None = None, namespace: str = "arr_coc") -> None:
    """Makes differentiating the gradient operator `name` of the operator `forward` an error.

    Args:
        name: The gradient operator.
        forward: The operator that it is a gradient of. None: `name` without "_grad".
        namespace: The namespace of both.
    """
    of = forward or name.removesuffix("_grad")
    reason = f"has no derivative: second derivatives of {namespace}::{of} are not supported; differentiate its"
    register_no_derivative(name, f"{reason} reference instead", namespace)
