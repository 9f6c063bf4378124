"""A compiled model that gives what it got, and takes a number and a tensor without elements."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.runtime import tiny

INPUTS = {"x": ("float32", (4, 3)), "number": ("float16", ()), "nothing": ("int32", (2, 0))}
OUTPUTS = {
    "same": ("float32", (4, 3)),
    "turned": ("float32", (3, 4)),
    "twice": ("float16", ()),
    "none": ("int32", (2, 0)),
    "columns": ("float32", (4, 3)),
}


class Odd(torch.nn.Module):
    """The first two outputs are the first input's memory; the second and the last are not row-major."""

    def forward(self, x: torch.Tensor, number: torch.Tensor, nothing: torch.Tensor) -> list[torch.Tensor]:
        return [x, x.t(), number * 2, nothing + 1, x.t().contiguous().t() * 2]


def write(path: Path) -> Path:
    """A package of the model."""
    example = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in INPUTS.values())
    return tiny.write(path, tiny.compiled(Odd(), example, None), call=tiny.tensors_call(INPUTS, OUTPUTS))
