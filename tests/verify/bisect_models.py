"""A model with an operator in the middle of its graph. It loads the right build of the operator's library."""

from __future__ import annotations

import os

import torch

torch.ops.load_library(os.environ["DOUBLING_LIBRARY"])
torch.library.register_fake("doubling::twice", torch.empty_like, allow_override=True)


class Chain(torch.nn.Module):
    """Six nodes that compute `y`, of which the third calls the operator."""

    def forward(self, x):
        small = torch.sigmoid(x + 1)
        doubled = torch.ops.doubling.twice(small)
        whole = doubled.sum(1, keepdim=True)
        return {"y": doubled / (whole + 1), "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


class Other(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))


class Routed(torch.nn.Module):
    """Chooses by sums that are 0 but for rounding, and calls the operator with what it chose."""

    def forward(self, x):
        kept = (x - x.roll(1, 1)).exp().log().sum(1, keepdim=True) > 0
        return {"kept": kept, "routed": torch.ops.doubling.twice(torch.where(kept, x, -x)), "stable": x + 1}
