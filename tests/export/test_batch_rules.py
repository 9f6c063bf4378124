"""Rules of vmap that tracing uses give what torch's own rules give; and `len` of a tensor varies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exportkit import ExportSpec
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.within_torch.batch_rules import varying_batches

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


def test_batched_gradients_and_none_are_torchs_own() -> None:
    x, unused = torch.randn(4, requires_grad=True), torch.ones(2, requires_grad=True)
    call = partial(torch.autograd.grad, x.sin(), [x, unused], torch.eye(4), is_grads_batched=True, allow_unused=True,
                   retain_graph=True)  # fmt: skip
    with varying_batches():
        found = call()
    assert found[1] is None
    assert torch.equal(found[0], call()[0])


class Lengths(nn.Module):
    def forward(self, x: Tensor, parts: list[Tensor]) -> tuple[Tensor, int]:
        padded = torch.cat([x, x.new_zeros(len(x) - 1, 3)]) if len(x) != 0 and len(parts) == 2 else x
        return padded[: len(padded) - len(parts[0])], len(parts)


def test_the_length_of_a_tensor_varies(tmp_path: Path) -> None:
    inputs = torch.randn(4, 3), [torch.randn(2), torch.randn(3)]
    shapes = {"x": {0: "n[2:64]"}}
    spec = ExportSpec(Lengths(), inputs, dynamic_shapes=shapes)
    export_program(EagerModel(spec), tmp_path / "program.pt2", TraceOptions(cases=3))
    assert len.__module__ == "builtins"
