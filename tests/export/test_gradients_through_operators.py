"""Models that ask for gradients through our own operators: of first order, of second where kernels have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exportkit import ExportSpec
from exportkit.arr_coc.ops import SPECS, OpSpec
from exportkit.errors import ExportError
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.program_file import load_program
from exportkit.export.models.resolved import EagerModel

CPU = torch.device("cpu")
grad = torch.autograd.grad


def differentiable(name: str) -> bool:
    return bool(SPECS[name].differentiable) and not name.endswith("_grad")


def gradients(spec: OpSpec, args: tuple[Any, ...], *, order: int) -> tuple[Tensor, ...]:
    """Returns the gradients of an operator's squared results, or of those gradients' squares."""
    bound = spec.arguments(args, {})
    names = spec.differentiable or [n for n, each in bound.items() if isinstance(each, Tensor)][:1]
    wanted = {n: bound[n].detach().requires_grad_() for n in names if isinstance(bound[n], Tensor)}
    results = spec.wrapper(**(bound | wanted))
    results = results if isinstance(results, tuple) else (results,)
    found = tuple(r.square() for r in results if r.is_floating_point())
    for number in range(order):
        total = torch.stack([each.sum() for each in found]).sum()
        left = number < order - 1
        grads = grad(total, list(wanted.values()), create_graph=left, allow_unused=True, materialize_grads=True)
        found = tuple(each.square() if left else each for each in grads)
    return found


class Gradients(nn.Module):
    """The gradients of many operators at their first samples."""

    def __init__(self, names: list[str], order: int) -> None:
        super().__init__()
        self.order = order
        torch.manual_seed(0)
        self.calls = {name: next(iter(SPECS[name].samples(CPU, torch.float32))).args for name in names}

    @property
    def inputs(self) -> list[Tensor]:
        return [each for call in self.calls.values() for each in call if isinstance(each, Tensor)]

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        calls = {n: tuple(next(rest) if isinstance(a, Tensor) else a for a in c) for n, c in self.calls.items()}
        return [each for name, call in calls.items() for each in gradients(SPECS[name], call, order=self.order)]


def exported(model: nn.Module, inputs: Any, folder: Path, **fields: Any) -> set[str]:
    """Exports a program, which is compared with eager, and returns the operators that it calls."""
    out = folder / "program.pt2"
    spec = ExportSpec(model.eval(), (inputs,), **fields)
    export_program(EagerModel(spec), out, TraceOptions(cases=1, edge_cases=False))
    graph = load_program(out).programs["forward"].graph
    return {str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("order", [1, 2])
def test_every_operator_with_a_gradient_is_differentiated_inside_of_a_model(order: int, tmp_path: Path) -> None:
    names = [name for name in SPECS if differentiable(name) and (order == 1 or SPECS[name].second_order)]
    assert len(names) >= (6 if order == 1 else 5)
    model = Gradients(names, order)
    called = exported(model, model.inputs, tmp_path)
    assert {f"arr_coc.{name}_grad" for name in names if f"{name}_grad" in SPECS} <= called


def lacking() -> list[tuple[str, int]]:
    """What operators lack: those without a gradient the first, and those without a second one that."""
    public = [name for name in SPECS if not name.endswith(("_grad", "_forward", "_out"))]
    own = [name for name in public if not SPECS[name].second_order and not SPECS[name].overload._schema.is_mutable]
    return [(name, 1 + differentiable(name)) for name in own if name != "allocate_lod_tokens"]  # of integers


@pytest.mark.parametrize(("name", "order"), lacking())
def test_a_gradient_that_an_operator_lacks_is_refused_in_a_sentence(name: str, order: int, tmp_path: Path) -> None:
    model = Gradients([name], order)
    what = rf"second derivatives of arr_coc::{name}" if order == 2 else rf"arr_coc::{name}"
    said = rf"{what} (are not supported|has no derivative|is for inference and has no derivative|is not differentiable)"
    with pytest.raises(ExportError, match=rf"in gradients: .*{said}.*(instead|detach)"):
        exported(model, model.inputs, tmp_path)


class Checkpointed(nn.Module):
    """Forces of an energy of which a part is computed once more in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))

    def part(self, x: Tensor) -> Tensor:
        return SPECS["softmax"].wrapper(self.net(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = checkpoint(self.part, x, use_reentrant=self.reentrant).square().sum()
        if self.reentrant:
            energy.backward()
            return x.grad
        return -grad(energy, x)[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_is_computed_again_for_its_gradient_is_traced(reentrant: bool, tmp_path: Path) -> None:
    model = Checkpointed(reentrant=reentrant)
    called = exported(model, torch.randn(6, 3), tmp_path, dynamic_shapes={"x": {0: "n[2:64]"}})
    assert {"arr_coc.softmax", "arr_coc.softmax_grad"} <= called
