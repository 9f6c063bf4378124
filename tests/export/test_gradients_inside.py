"""Models that ask torch for gradients in forward are traced as they are, at any size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exportkit import ExportSpec, Tolerance
from exportkit.errors import ExportError, UsageError
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import encode_manifest

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


def of_rows_by_the_older_vmap(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return grad(net(x).squeeze(1), x, torch.eye(x.shape[0]), is_grads_batched=True)[0]


def of_rows(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = net(x).squeeze(1)
    return torch.vmap(lambda v: grad(y, x, v)[0])(torch.eye(x.shape[0]))


def norm_of_rows(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    norm = partial(nn.functional.layer_norm, normalized_shape=(3,))
    return func.vmap(norm)(x), func.vmap(func.grad(lambda row: net(norm(row)).sum()))(x)


MODELS: dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        first_order, enabled_inside, of_the_input_itself, second_order, of_several, of_weights, by_backward, in_place,
        of_rows, norm_of_rows,
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


def exported(spec: ExportSpec, folder: Path) -> Path:
    """Exports a program, which is compared with eager at other sizes as well."""
    out = folder / "program.pt2"
    export_program(EagerModel(spec), out, TraceOptions(cases=3))
    return out


def spec_of(function: Callable[..., object], **fields: object) -> ExportSpec:
    shapes = {"x": {0: "n[2:64]"}}
    return ExportSpec(Model(function), (torch.randn(6, 3),), dynamic_shapes=shapes, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_inside_of_a_model_is_traced_at_any_size(name: str, tmp_path: Path) -> None:
    exported(spec_of(MODELS[name]), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_may_be_frozen_and_of_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Model(first_order).to(dtype).requires_grad_(False)
    exported(ExportSpec(model, (torch.randn(6, 3, dtype=dtype),), dynamic_shapes={"x": {0: "n[2:64]"}}), tmp_path)


def test_a_call_leaves_no_gradients_behind() -> None:
    model, x = Model(by_backward).eval(), torch.randn(2, 3)
    eager = EagerMethods(ExportSpec(model, (x,)))
    answer = eager.session().call("forward", eager.bind("forward", (x,), {}))
    assert not any(each.requires_grad for each in answer.outputs)
    assert not x.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_operator_without_a_gradient_is_named_with_its_line(tmp_path: Path) -> None:
    def rounds(net: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return grad(torch.bucketize(x, torch.arange(3.0)).sum(), x)[0]

    with pytest.raises(ExportError, match=r"test_gradients_inside.py:\d+ in rounds"):
        exported(spec_of(rounds), tmp_path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        # torch 2.15 traces it for one size.
        (lambda net, x: func.linearize(net, x)[1](x), r"linearize traces .*gradients_inside.py:\d+|needs x:0 == 6"),
        (
            lambda net, x: torch.autograd.functional.jacobian(net, x),
            r"inside.py:\d+ .* needs x:0 == 6",
        ),  # a Python loop
        (of_rows_by_the_older_vmap, r"older vmap of torch.* at .*inside.py:\d+ in of_rows_by(.|\n)*Write torch.vmap\("),
        (
            lambda net, x: torch.autograd.functional.jacobian(net, x, vectorize=True),
            r"older vmap(.|\n)*torch.func.jacrev\(f\)",
        ),
        (lambda net, x: grad(net(x), x.requires_grad_())[0], r"inside.py:\d+ .*only for scalar outputs"),
        (lambda net, x: grad(net(x).sum(), torch.ones(2).requires_grad_())[0], r"inside.py:\d+ .*allow_unused=True"),
    ],
)
def test_what_cannot_be_differentiated_is_refused_with_its_line(
    function: Callable[..., object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        exported(spec_of(function), tmp_path)


DECLARED = {"1": Tolerance(gradient_of=("0", "x"), scale=-1)}


def energy_and_forces(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    energy = inner(net, x)
    return energy, -grad(energy, x)[0]


def test_a_manifest_says_what_is_a_gradient_and_has_no_such_key_elsewhere(tmp_path: Path) -> None:
    with PackageReader(exported(spec_of(energy_and_forces, tolerances=DECLARED), tmp_path)) as reader:
        (_, forces), text = reader.manifest.call.outputs, encode_manifest(reader.manifest).decode()
    assert forces.tolerance.gradient_of.scale == -1  # type: ignore[union-attr]
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
        exported(spec_of(energy_and_forces, tolerances=tolerances), tmp_path)


def test_a_scale_of_zero_and_a_pair_of_something_else_are_refused() -> None:
    with pytest.raises(UsageError, match="finite and not 0"):
        Tolerance(gradient_of=("energy", "positions"), scale=0)
    with pytest.raises(UsageError, match="Name an output and an input"):
        Tolerance(gradient_of="energy")  # type: ignore[arg-type]
