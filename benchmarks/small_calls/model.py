"""A model that computes next to nothing, so that the time of a call is the time of what surrounds it."""

from __future__ import annotations

import torch
from torch import nn

from exportkit import ExportSpec


def spec() -> ExportSpec:
    """A product of 8 numbers with 64, and a ReLU; a batch of 1 to 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    return ExportSpec(model, (torch.randn(2, 8),), dynamic_shapes={"input": {0: "batch[1:64]"}}, name="small")
