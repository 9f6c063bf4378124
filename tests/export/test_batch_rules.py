"""The rules of vmap that tracing uses give what torch's own rules give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exportkit.export.torch_patches.batch_rules import varying_batches

func = torch.func
ROWS, WEIGHTS = torch.randn(4, 5, 3), torch.randn(4, 3)


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return nn.functional.layer_norm(x, (3,), weight, bias)


def weighed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (norm(x, weight, bias) * torch.arange(3.0)).square().sum()


CALLS: dict[str, Callable[[], object]] = {
    "no weights": lambda: func.vmap(norm, 1, 1)(ROWS),
    "weights of all": lambda: func.vmap(norm, (0, None, None))(ROWS, WEIGHTS[0], WEIGHTS[1]),
    "weights of each": lambda: func.vmap(norm)(ROWS, WEIGHTS, -WEIGHTS),
    "a weight of each, one input": lambda: func.vmap(norm, (None, 0, None))(ROWS[0], WEIGHTS, WEIGHTS[0]),
    "gradients": lambda: func.vmap(func.grad(weighed, (0, 1, 2)), (0, None, None))(ROWS, WEIGHTS[0], WEIGHTS[1]),
    "gradients of each": lambda: func.vmap(func.grad(weighed, (0, 1, 2)))(ROWS, WEIGHTS, -WEIGHTS),
    "gradients of rows alone": lambda: func.vmap(func.grad(weighed), (0, None, None))(
        ROWS[:, 0], WEIGHTS[0], WEIGHTS[1]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_layer_norm_under_vmap_is_torchs_own(name: str) -> None:
    wanted = CALLS[name]()
    with varying_batches():
        found = CALLS[name]()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(CALLS[name](), wanted, rtol=0, atol=0)
