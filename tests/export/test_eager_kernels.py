"""Operators that compiled code leaves to eager's kernels, and options that exportkit keeps to itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import lowering

from exportkit.errors import UsageError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.eager_kernels import _is_callable, _values, check_places, read_eager_kernels, with_tensors
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import compiled_with, leave_one
from exportkit.runtime.loader import load
from tests.export.function_models import FunctionModel, spec_of


def test_names_of_operators_are_read_and_wrong_ones_refused() -> None:
    assert read_eager_kernels(["aten.amin", "aten::div.Tensor", "amin"]) == (
        "aten.amin.default",
        "aten.amin.out",
        "aten.div.Tensor",
    )
    assert read_eager_kernels(["aten.amin", "aten"]) == ("aten",)
    with pytest.raises(UsageError, match=r"no operator 'aten\.amim'(?s:.*)aten\.amin"):
        read_eager_kernels(["aten.amim"])
    with pytest.raises(UsageError, match="no overload 'Tenzor'"):
        read_eager_kernels(["aten.div.Tenzor"])


@pytest.mark.parametrize(
    ("dtype", "number", "made"),
    [
        (torch.bfloat16, 3.0, torch.float64),
        (torch.int8, 3, torch.int64),
        (torch.int8, 3.0, torch.float32),
        (torch.float32, 2, torch.int64),
    ],
)
def test_a_kernel_gets_tensors_for_numbers_and_answers_the_same(
    dtype: torch.dtype, number: float, made: torch.dtype
) -> None:
    x = torch.arange(-8, 8).to(dtype)
    module: Any = torch.export.export(FunctionModel(lambda x: x / number), (x,)).module()
    with_tensors(module, read_eager_kernels(["aten.div.Tensor"]))
    (full,) = [node for node in module.graph.nodes if node.target is torch.ops.aten.full.default]
    assert full.kwargs["dtype"] is made
    answer = module(x)
    assert answer.dtype is (x / number).dtype
    assert torch.equal(answer, x / number)


def test_a_conversion_is_compiled_even_where_all_kernels_are_eagers() -> None:
    """torch 2.11's C interface to kernels gives it another dtype."""
    program = torch.export.export(FunctionModel(lambda x: x.half() + x), (torch.ones(3),))
    graph = program.run_decompositions().graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.aten._to_copy.default in {node.target for node in nodes}
    assert {node.target for node in nodes if _is_callable(node.target, _values(node))} == {torch.ops.aten.add.Tensor}


def test_a_place_is_a_node_of_the_graph_that_calls_the_operator() -> None:
    program = torch.export.export(FunctionModel(lambda x: torch.relu(torch.relu(x) - 1)), (torch.ones(3),))
    places = read_eager_kernels(["aten.relu.default@relu_1", "relu.default@relu"])
    assert places == ("aten.relu.default@relu_1", "aten.relu.default@relu")
    check_places(places, [program])
    with pytest.raises(UsageError, match=r"no node relu_2 that calls aten\.relu\.default") as caught:
        check_places(["aten.relu.default@relu_2"], [program])
    assert caught.value.hint == "It has aten.relu.default@relu, aten.relu.default@relu_1."
    with pytest.raises(UsageError, match=r"no operator 'aten\.relu@relu'"):
        read_eager_kernels(["aten.relu@relu"])


def test_an_operator_that_fails_at_two_places_is_left_everywhere() -> None:
    one = leave_one((), "aten.relu.default@relu")
    assert one == ("aten.relu.default@relu",)
    assert leave_one(one, "aten.relu.default@relu") == one
    both = leave_one(one, "aten.relu.default@relu_1")
    assert both == (*one, "aten.relu.default")
    assert leave_one(both, "aten.relu.default@relu_2") == both
    assert leave_one(("aten",), "aten.relu.default@relu_2") == ("aten",)


def everything(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operators that torch takes apart, that take no tensor, or a size in place of one."""
    position = torch.arange(1, x.shape[0] + 1, dtype=x.dtype)[:, None]
    halves = torch.nn.functional.glu(x.half().float() / x.shape[0], -1)
    spectrum = torch.fft.rfft(x) / x.shape[0]
    return torch.softmax(halves + position, -1), torch.layer_norm(x, x.shape[1:]).to(torch.int32), spectrum.abs()


class Spectrum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x), torch.relu(x - 0.5), (torch.fft.rfft(x) / x.shape[0]).abs()


def compiled_agrees(function: Any, out: Path, options: CompileOptions, said: list[str]) -> None:
    """Compiles a function of any number of rows, which answers what eager does."""
    spec = spec_of(function, torch.rand(5, 8), shapes={"x": {0: "n[2:64]"}})
    export_aoti(spec, out, TraceOptions(cases=1, edge_cases=False), options, progress=said.append)
    with load(out, device="cpu") as model:
        for x in (torch.rand(5, 8), torch.rand(64, 8)):
            torch.testing.assert_close(model(x), function(x))


@pytest.mark.slow
def test_code_that_leaves_every_operator_to_eager_compiles_and_agrees(tmp_path: Path) -> None:
    compiled_agrees(everything, tmp_path / "all.pt2", CompileOptions(eager_kernels=("aten",)), [])


@pytest.mark.slow
def test_a_node_that_does_not_compile_is_left_to_eager_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own: a complex quotient by a size. And one of two uses of an operator, whose lowering fails."""
    relu = lowering.lowerings[torch.ops.aten.relu.default]
    calls: list[Any] = []

    def second_fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise NotImplementedError("no second relu")
        return relu(*args)

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.relu.default, second_fails)
    said: list[str] = []
    compiled_agrees(Spectrum(), tmp_path / "spectrum.pt2", CompileOptions(), said)
    assert any("with eager's kernel of aten.relu.default, test_eager_kernels.py:" in line for line in said), said
    with PackageReader(tmp_path / "spectrum.pt2") as reader:
        left = compiled_with(reader, reader.manifest.targets[0]).eager_kernels
    assert left == ("aten.relu.default@relu_1", "aten.div.Tensor@div")
