"""Quantized products without a kernel are said, and models quantized with torchao agree."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from exportkit.cli import main
from exportkit.export.artifact import export_program
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.torch_patches.operator_bodies import traced_bodies
from exportkit.export.trace.missed_kernels import float_products
from exportkit.spec import ExportSpec
from tests.runtime import tiny

_LIBRARY = torch.library.Library("exportkit_test_written_out", "DEF")
_LIBRARY.define("scale(Tensor x, float by) -> Tensor")
_LIBRARY.impl("scale", lambda x, by: (x * by).round(), "CompositeImplicitAutograd")


class Quantized(nn.Module):
    """A product of int8 weights, as numbers or as integers."""

    def __init__(self, *, integers: bool) -> None:
        super().__init__()
        self.integers = integers
        self.weight = nn.Buffer(torch.randint(-9, 9, (8, 16), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.ops.exportkit_test_written_out.scale(x, 20.0)
        if self.integers:
            return torch._int_mm(steps.to(torch.int8), self.weight.T).float()
        return (steps @ (self.weight.to(x.dtype) * 0.5).T).relu()


def traced(model: nn.Module) -> torch.export.ExportedProgram:
    with traced_bodies():
        return torch.export.export(model.eval(), (torch.rand(32, 16),), strict=False)


def test_a_product_of_quantized_weights_without_a_kernel_is_said_at_export(tmp_path) -> None:
    spec = ExportSpec(Quantized(integers=False), (torch.rand(4, 16),), dynamic_shapes={"x": {0: "batch[1:8]"}})
    said: list[str] = []
    manifest = export_program(spec, tmp_path / "out.pt2", progress=said.append)
    assert manifest.operators == ()
    assert [line for line in said if "int8 weights are multiplied as float32 at test_quantized.py" in line]


class Scaled(nn.Module):
    """A product of int8 weights, with the scales before or behind it."""

    def __init__(self, dtype: torch.dtype, *, behind: bool) -> None:
        super().__init__()
        self.behind = behind
        self.weight = nn.Buffer(torch.randint(-9, 9, (8, 16), dtype=torch.int8))
        self.scales = nn.Buffer(torch.rand(8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.behind:
            return nn.functional.linear(x.to(self.scales), self.weight.to(self.scales)) * self.scales
        return nn.functional.linear(x.to(self.scales), self.weight.to(self.scales) * self.scales[:, None])


def test_a_product_that_inductor_computes_with_integers_is_not_said_to_miss_them() -> None:
    assert float_products(traced(Scaled(torch.bfloat16, behind=True))) == []
    assert len(float_products(traced(Scaled(torch.bfloat16, behind=False)))) == 1
    assert len(float_products(traced(Scaled(torch.float32, behind=True)))) == 1


def test_what_was_missed_travels_with_the_code_and_is_shown(tmp_path, tiny_files, capsys) -> None:
    (record,) = [name for name in tiny_files if name.endswith("wrapper_metadata.json")]
    plan = CompilePlan(torch.device("cpu"), (None,))
    notes = plan.remembered(["int8 weights are multiplied as float32"])["aot_inductor.metadata"]
    changed = tmp_path / "metadata.json"
    changed.write_text(json.dumps(json.loads(tiny_files[record].read_text()) | notes))
    package = tiny.write(tmp_path / "missed.pt2", {**tiny_files, record: changed})
    assert main(["inspect", str(package)]) == 0
    assert "no fast kernel: int8 weights are multiplied as float32" in capsys.readouterr().out
    assert main(["inspect", str(package), "--json"]) == 0
    (lines,) = json.loads(capsys.readouterr().out)["missed_kernels"].values()
    assert lines == ["int8 weights are multiplied as float32"]


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_models_quantized_with_torchao_agree(tmp_path, name: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).bfloat16().eval()
    torchao.quantize_(model, getattr(torchao, name)())
    example = torch.randn(4, 32, dtype=torch.bfloat16)
    said: list[str] = []
    spec = ExportSpec(model, (example,), dynamic_shapes={"input": {0: "batch[1:8]"}})
    export_program(spec, tmp_path / "quantized.pt2", progress=said.append)  # and compares it with the model
    assert not [line for line in said if "no fast kernel" in line]


def test_only_products_of_quantized_weights_as_floating_numbers_are_found() -> None:
    (line,) = float_products(traced(Quantized(integers=False)))
    assert "return (steps @ (self.weight.to(x.dtype) * 0.5).T).relu()" in line
    assert "torch has a kernel for int8 weights with bfloat16 inputs" in line
    assert float_products(traced(Quantized(integers=True))) == []
    assert float_products(traced(nn.Linear(16, 3))) == []
    named = nn.Sequential(nn.Linear(16, 3))
    assert float_products(traced(named)) == []
