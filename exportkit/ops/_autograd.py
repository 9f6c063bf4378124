"""Registration of gradients."""

from __future__ import annotations

from typing import Any

import torch


def register_no_second_derivative(name: str, forward: str | None = None, namespace: str = "arr_coc") -> None:
    """Makes differentiating the gradient operator `<namespace>::<name>` an error that names it.

    Without a rule torch only warns and the second gradient is None.

    Args:
        name: The gradient operator.
        forward: The operator that it is a gradient of. None: `name` without "_grad".
        namespace: The namespace of both.
    """
    of = forward or name.removesuffix("_grad")

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{namespace}::{name} has no derivative: second derivatives of {namespace}::{of} are not supported; "
            f"differentiate its reference instead"
        )

    torch.library.register_autograd(f"{namespace}::{name}", backward)


def register_no_derivative(name: str, composition: str) -> None:
    """Makes requesting a gradient of `arr_coc::<name>` an error that names the operators to train with instead."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"arr_coc::{name} is for inference and has no derivative: train with its parts instead, {composition}"
        )

    torch.library.register_autograd(f"arr_coc::{name}", backward)
