"""Registration of gradients."""

from __future__ import annotations

from typing import Any

import torch


def register_no_second_derivative(name: str) -> None:
    """Makes differentiating the gradient operator `arr_coc::<name>` an error that names it.

    Without a rule torch only warns and leaves the second gradient None.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        forward = name.removesuffix("_grad")
        raise RuntimeError(
            f"arr_coc::{name} has no derivative: second derivatives of arr_coc::{forward} are not supported; "
            f"differentiate exportkit.ops.{forward}'s reference instead"
        )

    torch.library.register_autograd(f"arr_coc::{name}", backward)
