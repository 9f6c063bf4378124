"""A compiled model with an input of each dtype, which answers with a copy of it; its rows may be none."""

from __future__ import annotations

from pathlib import Path

import torch

from exportkit.package import manifest as m
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
    shapes = [(m.Size(dimension="batch"), *tensor.shape[1:]) for tensor in inputs]
    nodes = [m.TensorNode(index=place) for place in range(len(inputs))]
    exact = m.OutputTolerance(rtol=0.0, atol=0.0)
    call = m.Call(
        parameters=tuple(
            m.Parameter(name=f"of_{dtype}", kind="positional", value=node) for dtype, node in zip(DATATYPES, nodes)
        ),
        inputs=tuple(
            m.TensorInput(name=f"of_{d}", dtype=d, shape=shape, written=None) for d, shape in zip(DATATYPES, shapes)
        ),
        result=m.SequenceNode(kind="list", items=tuple(nodes)),
        outputs=tuple(
            m.TensorOutput(name=str(place), dtype=dtype, shape=shape, tolerance=exact)
            for place, (dtype, shape) in enumerate(zip(DATATYPES, shapes))
        ),
        dimensions=(m.Dimension(name="batch", min=0, max=64),),
    )
    return tiny.write(path, files, call=call)
