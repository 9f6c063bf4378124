"""Operators that are Python functions of torch's are written out, and quantized products without a kernel are said."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit.export.artifact import export_program
from exportkit.export.composites import is_written_out, written_out
from exportkit.export.missed_kernels import float_products
from exportkit.spec import ExportSpec

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
    return written_out(torch.export.export(model.eval(), (torch.rand(32, 16),), strict=False))


def test_an_operator_that_is_a_python_function_is_written_out(tmp_path) -> None:
    assert is_written_out(torch.ops.exportkit_test_written_out.scale.default)
    spec = ExportSpec(Quantized(integers=False), (torch.rand(4, 16),), dynamic_shapes={"x": {0: "batch[1:8]"}})
    said: list[str] = []
    manifest = export_program(spec, tmp_path / "out.pt2", progress=said.append)
    assert manifest.operators == ()
    assert [line for line in said if "multiplied as floating numbers at test_quantized.py" in line]


def test_only_products_of_quantized_weights_as_floating_numbers_are_found() -> None:
    (line,) = float_products(traced(Quantized(integers=False)))
    assert "return (steps @ (self.weight.to(x.dtype) * 0.5).T).relu()" in line
    assert float_products(traced(Quantized(integers=True))) == []
    assert float_products(traced(nn.Linear(16, 3))) == []
    named = nn.Sequential(nn.Linear(16, 3))
    assert float_products(traced(named)) == []
