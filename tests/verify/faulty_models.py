"""A model of the operator of faulty_kernels.cpp, which may be wrong for edge values."""

from __future__ import annotations

import os

import torch

from exportkit import ExportSpec

torch.ops.load_library(os.environ["PLANTED_LIBRARY"])


@torch.library.register_fake("injected::look", allow_override=True)
def _fake(x, levels, mask):
    rows, n = x.shape
    return (
        x.new_empty(rows, 2),
        x.new_empty(rows, dtype=torch.int64),
        x.new_empty(rows, n),
        x.new_empty(rows, n),
        x.new_empty(rows, n, dtype=torch.int16),
        x.new_empty(rows),
    )


class Looks(torch.nn.Module):
    """What the operator sees in each row."""

    def forward(self, x, levels, mask):
        ends, at, signs, halves, sizes, means = torch.ops.injected.look(x, levels, mask)
        return {"ends": ends, "at": at, "signs": signs, "halves": halves, "sizes": sizes, "means": means}


def looks():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, generator=generator)
    levels = torch.randint(-100, 100, (3, 20), generator=generator, dtype=torch.int8)
    mask = torch.rand(3, 20, generator=generator) < 0.5
    return ExportSpec(
        model=Looks(),
        example_inputs=(x, levels, mask),
        dynamic_shapes={name: {0: "rows[1:8]", 1: "n[2:40]"} for name in ("x", "levels", "mask")},
    )
