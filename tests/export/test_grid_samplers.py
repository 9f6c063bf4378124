"""Compiled samples of a grid are eager's where the image or the grid is NaN, or a place is outside."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.runtime.loader import load
from tests.conftest import DEVICES
from tests.export.function_models import spec_of

pytestmark = pytest.mark.slow

_WAYS = [("bilinear", "zeros", True), ("bilinear", "zeros", False), ("bilinear", "border", False)]
_WAYS += [("nearest", "reflection", True), ("bicubic", "zeros", True)]


def samples(image: Tensor, grid: Tensor) -> list[Tensor]:
    return [
        grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=corners)
        for mode, padding, corners in _WAYS
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_samples_are_eagers_at_nan_and_outside(device: str, tmp_path: Path) -> None:
    image, grid = torch.rand(2, 3, 5, 7), torch.rand(2, 4, 6, 2) * 3 - 1.5
    grid[0, :3, 0, 0] = torch.tensor([math.nan, math.inf, -math.inf])
    grid[1, 0, 0, 1] = math.nan
    batch = {0: "batch[1:4]"}
    spec = spec_of(samples, torch.rand(2, 3, 5, 7), torch.rand(2, 4, 6, 2), shapes=(batch, batch))
    out = tmp_path / "samples.pt2"
    export_aoti(spec, out, TraceOptions(device=device, cases=2, edge_cases=False))
    image[0, :, 0, 0] = math.nan  # which places outside must not meet
    image, grid = image.to(device), grid.to(device)
    with load(out, device) as model:
        torch.testing.assert_close(model(image, grid), samples(image, grid), equal_nan=True)
