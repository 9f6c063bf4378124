"""Weights in the order that products read: the graph computes the same, and only what the weights decide is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import exportkit
from exportkit.export.compile import packed_weights
from exportkit.export.compile.packed_weights import pack
from exportkit.package.archive import PackageReader
from exportkit.package.elf import read_elf
from tests.artifacts import artifact
from tests.export.small_models import Small

aten = torch.ops.aten


def graph_of(model: nn.Module, *inputs: Tensor) -> torch.fx.GraphModule:
    """The model's operators as Inductor sees them."""
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model.eval(), inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    module = program.run_decompositions().module()
    assert isinstance(module, torch.fx.GraphModule)
    return module


def packed(module: torch.fx.GraphModule) -> set[str]:
    """Packs the weights; returns the kinds of nodes that are computed once."""
    computed = pack(module.graph)
    module.graph.lint()
    module.recompile()
    return {str(node.target) for node in computed}


def count(module: torch.fx.GraphModule, target: object) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_takes_transposed_weights_and_adds_its_bias_apart(bias: bool) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.ReLU()), torch.randn(3, 6)
    module = graph_of(model, x)
    assert packed(module) == {"aten.permute.default", "aten.clone.default"}
    assert count(module, aten.addmm.default) == 0
    torch.testing.assert_close(module(x), model(x))
    [product] = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert product.args[1].meta["val"].is_contiguous()


def test_a_recurrent_cell_takes_transposed_weights() -> None:
    cell, inputs = nn.LSTMCell(4, 6), (torch.randn(2, 4), torch.randn(2, 6), torch.randn(2, 6))

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return self.cell(x, (h, c))

    module = graph_of(Step(), *inputs)
    assert packed(module)
    assert count(module, aten.addmm.default) == 0
    torch.testing.assert_close(module(*inputs), cell(inputs[0], inputs[1:]))


def test_the_roots_of_a_normalization_are_computed_once() -> None:
    class Normalized(nn.Module):  # what Inductor makes of a BatchNorm
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.variance = nn.Parameter(torch.randn(5)), nn.Parameter(torch.rand(5) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.mean[:, None]) * (self.variance + 1e-5).sqrt().reciprocal()[:, None]

    model, x = Normalized(), torch.randn(3, 5, 2)
    module = graph_of(model, x)
    assert packed(module) == {"aten.add.Tensor", "aten.sqrt.default", "aten.reciprocal.default"}
    torch.testing.assert_close(module(x), model(x))


def test_roots_of_inputs_single_numbers_and_large_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.many = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(9))

        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt() * self.one.exp() + self.many.sqrt() + (self.many * x).exp()

    monkeypatch.setattr(packed_weights, "MOST_ELEMENTS", 8)
    assert not packed(graph_of(Roots(), torch.rand(3, 9)))
    monkeypatch.setattr(packed_weights, "MOST_ELEMENTS", 9)
    assert packed(graph_of(Roots(), torch.rand(3, 9))) == {"aten.sqrt.default"}


def test_large_weights_stay_where_the_package_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), torch.randn(3, 6)
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 4 * (30 + 20) - 1)
    module = graph_of(model, x)
    assert not packed(module)
    assert count(module, aten.addmm.default) == 2
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 4 * (30 + 20))
    assert packed(graph_of(model, x))


def test_tied_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nn.Linear(5, 5)
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 4 * 25)
    assert packed(graph_of(nn.Sequential(first, nn.ReLU(), first), torch.randn(3, 5)))


class Others(nn.Module):
    """Products whose second factor is an input, contiguous, or of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.straight = nn.Parameter(torch.randn(4, 4))
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ self.straight @ y.t()).sum() + self.low(x.bfloat16()).sum()


def test_other_products_are_left_alone() -> None:
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    module = graph_of(Others(), *inputs)
    before = str(module.graph)
    assert not packed(module)
    assert str(module.graph) == before


def test_the_code_calls_no_convolution_and_takes_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 2, 16)
    with PackageReader(artifact("small-convolutions")) as reader:
        [library] = [name for name in reader.names if name.endswith(".so")]
        reader.extract(library, tmp_path / "model.so")
    symbols = read_elf(tmp_path / "model.so").torch_symbols
    assert "aoti_torch_cpu_mm_out" in symbols
    assert not {name for name in symbols if "convolution" in name or "addmm" in name}
    for runtime in ("auto", "python"):
        monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
        with exportkit.load(artifact("small-convolutions"), device="cpu", runners=2) as model:
            torch.testing.assert_close(model(x), Small(0)(x))
            model.swap_weights(Small(1).state_dict())
            torch.testing.assert_close(model(x), Small(1)(x))
