"""Models that ask torch for gradients in forward are traced as they are, at any size, through our own operators too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exportkit import ExportSpec, Tolerance
from exportkit.arr_coc.ops import SPECS, OpSpec
from exportkit.errors import ExportError, UsageError
from exportkit.export.models.program_file import load_program
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.package.manifest import encode_manifest
from tests.export.function_models import CPU, exported, spec_of

grad, func = torch.autograd.grad, torch.func


def inner(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()


def first_order(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return -grad(inner(net, x), x)[0]


def enabled_inside(net: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return first_order(net, x)


def of_the_input_itself(net: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    return grad(inner(net, x), x, retain_graph=True)[0]


def second_order(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    (forces,) = grad(inner(net, x), x, create_graph=True)
    return forces, grad(forces.square().sum(), x)[0]


def of_several(net: nn.Module, x: Tensor) -> tuple[Tensor | None, ...]:
    x, strain, unused = (
        x.clone().requires_grad_(),
        torch.zeros(3, 3, requires_grad=True),
        torch.ones(2).requires_grad_(),
    )
    y = net(x @ (torch.eye(3) + strain))
    return grad([y], [x, strain, unused], grad_outputs=[torch.ones_like(y)], allow_unused=True)[:2]


def of_weights(net: nn.Module, x: Tensor) -> list[Tensor]:
    return list(grad(inner(net, x), list(net.parameters())))


def by_backward(net: nn.Module, x: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    inner(net, x).backward()
    return x.grad


def in_place(net: nn.Sequential, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    hidden = net[0](x)
    hidden[:, 0] = 0
    return grad(net[1:](hidden).sum(), x)[0]


def of_rows(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = net(x).squeeze(1)
    return torch.vmap(lambda v: grad(y, x, v)[0])(torch.eye(x.shape[0]))


MODELS: dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        first_order, enabled_inside, of_the_input_itself, second_order, of_several, of_weights, by_backward, in_place,
        of_rows,
    )
} | {
    "func.grad": lambda net, x: func.grad(lambda q: inner(net, q))(x),
    "func.vjp": lambda net, x: func.vjp(net, x)[1](x[:, :1])[0],
    "func.jvp": lambda net, x: func.jvp(net, (x,), (torch.ones_like(x),)),
    "func.jacrev of rows": lambda net, x: func.vmap(func.jacrev(net))(x),
    "func.jacfwd of rows": lambda net, x: func.vmap(func.jacfwd(net))(x),
    "func.jacrev twice": lambda net, x: func.jacrev(func.jacrev(lambda q: inner(net, q)))(x[:2]),
    "func.jacrev": lambda net, x: func.jacrev(net)(x),
    "a product with the Hessian": lambda net, x: func.jvp(func.grad(lambda q: inner(net, q)), (x,), (x.sin(),))[1],
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> object:
        return self.function(self.net, x)


def rows_of(function: Callable[..., object], **fields: Any) -> ExportSpec:
    return spec_of(Model(function), torch.randn(6, 3), shapes={"x": {0: "n[2:64]"}}, **fields)


@pytest.mark.slow_but("first_order", "in_place", "func.vjp")
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_inside_of_a_model_is_traced_at_any_size(name: str, tmp_path: Path) -> None:
    exported(rows_of(MODELS[name]), tmp_path, cases=3)


@pytest.mark.slow_but("dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_may_be_frozen_and_of_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Model(first_order).to(dtype).requires_grad_(False)
    exported(spec_of(model, torch.randn(6, 3, dtype=dtype), shapes={"x": {0: "n[2:64]"}}), tmp_path, cases=3)


def test_a_call_leaves_no_gradients_behind() -> None:
    model, x = Model(by_backward).eval(), torch.randn(2, 3)
    eager = EagerMethods(ExportSpec(model, (x,)))
    answer = eager.session().call("forward", eager.bind("forward", (x,), {}))
    assert not any(each.requires_grad for each in answer.outputs)
    assert not x.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow_but("<lambda>-gradients*")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda net, x: torch.autograd.functional.jacobian(net, x), r"needs x:0 == 6"),  # a Python loop
        (lambda net, x: grad(x.requires_grad_().bucketize(x[0]).sum(), x)[0], r"gradients.py:\d+ in <lambda>"),
        (lambda net, x: grad(net(x), x.requires_grad_())[0], r"gradients.py:\d+ .*only for scalar outputs"),
        (lambda net, x: grad(net(x).sum(), torch.ones(2).requires_grad_())[0], r"gradients.py:\d+ .*allow_unused=True"),
    ],
)
def test_what_cannot_be_differentiated_is_refused_with_its_line(
    function: Callable[..., object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        exported(rows_of(function), tmp_path)


def energy_and_forces(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    energy = inner(net, x)
    return energy, -grad(energy, x)[0]


def test_a_manifest_says_what_is_a_gradient_and_has_no_such_key_elsewhere(tmp_path: Path) -> None:
    manifest = exported(
        rows_of(energy_and_forces, tolerances={"1": Tolerance(gradient_of=("0", "x"), scale=-1)}), tmp_path
    )
    (_, forces), text = manifest.call.outputs, encode_manifest(manifest).decode()
    gradient = forces.tolerance.gradient_of
    assert gradient is not None
    assert gradient.scale == -1
    assert text.count("gradient_of") == 1


@pytest.mark.parametrize(
    ("tolerances", "message"),
    [
        ({"1": Tolerance(gradient_of=("0", "y"))}, "no such input"),
        ({"1": Tolerance(gradient_of=("2", "x"))}, "names the output '2'"),
        ({"0": Tolerance(gradient_of=("1", "x"))}, "has the shape of the input"),
    ],
)
def test_what_cannot_be_a_gradient_is_refused(tolerances: dict[str, Tolerance], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        exported(rows_of(energy_and_forces, tolerances=tolerances), tmp_path)


# --- through operators -----------------------------------------------------------------------------------------------


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


def operators_of(spec: ExportSpec, folder: Path) -> set[str]:
    """Exports a program, which is compared with eager, and returns the operators that it calls."""
    exported(spec, folder, cases=1, edge_cases=False)
    graph = load_program(folder / "x.pt2").programs["forward"].graph
    return {str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function"}


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
def test_every_operator_with_a_gradient_is_differentiated_inside_of_a_model(order: int, tmp_path: Path) -> None:
    names = [name for name in SPECS if differentiable(name) and (order == 1 or SPECS[name].second_order)]
    assert len(names) >= (6 if order == 1 else 5)
    model = Gradients(names, order)
    called = operators_of(spec_of(model, model.inputs), tmp_path)
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
        operators_of(spec_of(model, model.inputs), tmp_path)


def checkpointed(reentrant: bool) -> Callable[..., object]:
    """Forces of an energy of which a part is computed once more in the backward pass."""

    def forces(net: nn.Sequential, x: Tensor) -> Tensor | None:
        x = x.detach().requires_grad_()
        part = checkpoint(lambda x: SPECS["softmax"].wrapper(net[:2](x)), x, use_reentrant=reentrant)
        if reentrant:
            part.square().sum().backward()
            return x.grad
        return -grad(part.square().sum(), x)[0]

    return forces


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_is_computed_again_for_its_gradient_is_traced(reentrant: bool, tmp_path: Path) -> None:
    called = operators_of(rows_of(checkpointed(reentrant)), tmp_path)
    assert {"arr_coc.softmax", "arr_coc.softmax_grad"} <= called
