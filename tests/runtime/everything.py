"""Compiled models with an input of each dtype, which is copied, and of odd shapes, which may be the output."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.serve.protocol.datatypes import DATATYPES
from tests.runtime import tiny


class Everything(torch.nn.Module):
    """Takes a tensor of each dtype."""

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(0, 100, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)


def example(rows: int) -> list[torch.Tensor]:
    return [drawn(getattr(torch, dtype), rows, *(3, 2)[: place % 3]) for place, dtype in enumerate(DATATYPES)]


def write(path: Path) -> Path:
    """Writes the package."""
    batch = torch.export.Dim("batch", min=0, max=64)
    inputs = example(3)
    files = tiny.compiled(Everything(), tuple(inputs), {"tensors": tuple({0: batch} for _ in inputs)})
    described = {
        f"of_{dtype}": (dtype, (tiny.BATCH, *tensor.shape[1:])) for dtype, tensor in zip(DATATYPES, inputs, strict=True)
    }
    call = tiny.tensors_call(described, list(described.values()), batch=(0, 64))
    return tiny.write(path, files, call=call)


ODD_INPUTS = {"x": ("float32", (4, 3)), "number": ("float16", ()), "nothing": ("int32", (2, 0))}
ODD_OUTPUTS = {
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


def write_odd(path: Path) -> Path:
    """Writes the package of the other."""
    example = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in ODD_INPUTS.values())
    return tiny.write(path, tiny.compiled(Odd(), example, None), call=tiny.tensors_call(ODD_INPUTS, ODD_OUTPUTS))
