"""A sample has the bits that it has alone, in batches at which kernels share out their work otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exportkit.arr_coc.ops import SPECS, Sample, compute_salience_forward
from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.operator_trial import Subject


def texture(device: torch.device, batch: int, grid: int, patch: int) -> Sample:
    return Sample("", (torch.rand(batch, 3, grid * patch, grid * patch, device=device), patch))


def selection(device: torch.device, rows: int, columns: int, width: int, total: int | None) -> Sample:
    """More samples than are selected from at a time."""
    scores = torch.rand(150, rows * columns, device=device)
    features = torch.randn(150, rows * columns, width, device=device)
    return Sample("", (scores, features, 60, rows, columns, 64, 400, 2.2, total))


def salience_gradient(
    device: torch.device, batch: int, size: tuple[int, int], patch: int, width: int, dtype: torch.dtype = torch.float32
) -> Sample:
    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    patches = (size[0] // patch) * (size[1] // patch)
    features, lab = normal(batch, patches, width) + 0.5, normal(batch, 3, *size, scale=20)
    gx, gy = normal(batch, 1, *size, scale=0.1), normal(batch, 1, *size, scale=0.1)
    rest = patch, (3.0, 4.0, 5.0)
    statistics = compute_salience_forward(features, lab, gx, gy, *rest)[1:]
    grad = normal(batch, patches)
    return Sample("", (grad, features, gx, gy, *statistics, *rest, True, True, True, True))


CALLS: dict[str, tuple[Any, ...]] = {
    # The rows of a patch are shared out otherwise where there are many; columns of an odd width, a thread each.
    **{f"texture_statistics {sizes}": (texture, *sizes) for sizes in [(40, 14, 14), (40, 14, 32), (1024, 1, 65)]},
    **{
        f"select_patches {sizes} {total}": (selection, *sizes, total)
        for sizes in [(14, 14, 65), (28, 28, 264), (130, 140, 8)]
        for total in (None, 9000)
    },
    # On a GPU the parts of a gradient are kernels of their own in large batches, and one kernel in small ones.
    **{
        f"compute_salience_grad {dtype}": (salience_gradient, 300, (64, 64), 4, 24, dtype)
        for dtype in (torch.float32, torch.float16, torch.float64)
    },
    "compute_salience_grad, two samples of features at a time": (salience_gradient, 3, (32, 32), 2, 900),
    "compute_salience_grad, one sample of features at a time": (salience_gradient, 3, (32, 32), 2, 1100),
    "compute_salience_grad, rows stored past the caches": (salience_gradient, 3, (640, 640), 16, 8),
    "compute_salience_grad, rows that cannot be, not being whole vectors": (salience_gradient, 3, (630, 630), 15, 8),
    **{
        f"compute_salience_grad, more than 16 MiB of colours {width} {dtype}": (
            *(salience_gradient, -(-(17 << 20) // (3 * 256 * width * dtype.itemsize)), (256, width), 8, 4, dtype),
        )
        for width in (256, 8)
        for dtype in (torch.float32, torch.float16)
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_sample_has_the_same_bits_alone_and_among_many(name: str, device: torch.device) -> None:
    make, *sizes = CALLS[name]
    spec = SPECS[name.partition(" ")[0].rstrip(",")]
    report = check_operator(Subject(spec.overload, (make(device, *sizes),), spec.reference, spec), ["batch"])
    assert report.findings == ()
    assert report.passed == ("batch",)
