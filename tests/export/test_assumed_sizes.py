"""No code is written that takes a size that varies for the example's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.assumed_sizes import AssumedSizeError, no_assumed_sizes
from exportkit.export.compile.compile_failure import UncompiledError, described
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import compiled_with
from exportkit.runtime.loader import load


class Pools(torch.nn.Module):
    """Inductor keeps the sizes of the example in each of these."""

    def forward(self, x):
        halves = functional.glu(x, -1)
        return functional.adaptive_avg_pool2d(x, (5, 9)), functional.adaptive_max_pool2d(x, (5, 9)), halves


def pools() -> ExportSpec:
    sizes = {0: "batch[1:64]", 2: "h[8:80]", 3: "2*w[4:40]"}
    return ExportSpec(Pools(), (torch.rand(2, 3, 22, 32),), dynamic_shapes={"x": sizes})


@pytest.mark.process
def test_an_operator_whose_size_inductor_fixes_is_left_to_eager(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "pools.pt2"
    export_aoti(EagerModel(pools()), out, TraceOptions(cases=1, edge_cases=False), progress=said.append)
    kernels = ("_adaptive_avg_pool2d", "adaptive_max_pool2d", "glu")
    for name in kernels:
        assert any(f"with eager's kernel of aten.{name}.default, test_assumed_sizes.py:" in line for line in said), said
    with PackageReader(out) as reader:
        left = compiled_with(reader, reader.manifest.targets[0]).eager_kernels
    places = [name.removeprefix("_") for name in kernels]
    assert sorted(left) == [f"aten.{name}.default@{name}" for name in places]
    with load(out, device="cpu") as model:
        for shape in ((1, 3, 8, 8), (5, 3, 33, 80)):
            x = torch.rand(shape)
            for one, other in zip(model(x), Pools()(x), strict=True):
                torch.testing.assert_close(one, other)


def test_a_size_that_no_kernel_of_eager_helps_is_refused_with_its_line() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.glu.default, (graph.placeholder("x"),))
    node.meta["stack_trace"] = '  File "/models/net.py", line 7, in forward\n    y = x.one(2)\n'
    error = AssumedSizeError("x:0 == 2")
    failed = UncompiledError(str(error), error.refusal(described(node)), described(node), ["aten.glu.default@glu"])
    left = failed.left_to_eager(())
    assert left == ("aten.glu.default@glu",)
    with pytest.raises(ExportError, match=r"fixes a size .* at aten\.glu\.default, net.py:7.*only where x:0 == 2"):
        failed.left_to_eager(left)


def test_conditions_that_choose_a_layout_are_forgiven() -> None:
    model = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.rand(2, 3, 8, 8),), dynamic_shapes=({0: batch},))
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    x = values["input"]
    with no_assumed_sizes(program):
        with pytest.raises(AssumedSizeError, match="only where input:0 < 30"):
            bool(x.shape[0] < 30)
        with pytest.raises(AssumedSizeError, match="only where input:0 == 2"):
            int(x.shape[0])
        assert x.shape[0] > 1
        functional.conv2d(x, values["p_weight"])  # asks which of its kernels will compute it


class Chosen(torch.nn.Module):
    def forward(self, x):
        return x[x > 0].exp()


def test_a_size_that_depends_on_values_may_be_of_any_range() -> None:
    program = torch.export.export(Chosen(), (torch.rand(2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert any(not range_.upper.is_Integer for range_ in program.range_constraints.values())
    x = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    with no_assumed_sizes(program):
        assert int(x.shape[0]) == 2  # nothing is declared of it
