"""A module that calls the operators of op_shapes.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from exportkit import ExportSpec

_FAKES = {
    "scaled": lambda x, by: torch.empty_like(x),
    "scaled.Tensor": lambda x, by: torch.empty_like(x),
    "sum_of": lambda xs, bias=None, *, weights: torch.empty_like(xs[0]),
    "halves": lambda x: [torch.empty_like(x), torch.empty_like(x)],
    "filled": lambda x, dtype, device, how: torch.empty_like(x, dtype=dtype, device=device),
    "negated": torch.empty_like,
    "positive": lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"op_shapes::{_name}", _fake)


class Shapes(torch.nn.Module):
    """Written arguments, lists, optionals, overloads, a dtype, a device, a string, a size that depends on data."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        ops = torch.ops.op_shapes
        total = torch.empty_like(x)
        ops.add_out(x, x + 1, total)
        doubled = x.clone()
        ops.twice_(doubled)
        first, second = ops.halves(x)
        return {
            "total": total,
            "doubled": doubled,
            "number": ops.scaled(x, 3.0),
            "tensor": ops.scaled(x, torch.full((1,), 5.0)),
            "sum": ops.sum_of([x, first], second, weights=[1, 2]) + ops.sum_of([x], weights=[4]),
            "filled": ops.filled(x, torch.int64, x.device, "ones"),
            "like": ops.filled(x, None, x.device, "zeros"),
            "minus": ops.minus(x),
            "positive": ops.positive(x).sum(),
            # A kernel of torch, with an integer that the call leaves to its default: alpha.
            "added": x.bfloat16().index_add(0, torch.zeros(1, dtype=torch.int64), x[:1].bfloat16()),
        }


def shapes() -> ExportSpec:
    return ExportSpec(model=Shapes(), example_inputs=(torch.randn(4, 3),), dynamic_shapes={"x": {0: "rows[1:64]"}})
