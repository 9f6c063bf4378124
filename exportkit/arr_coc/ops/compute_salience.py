"""Salience: how much a patch stands out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient, register_no_second_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, check, normals, operator_like
from exportkit.arr_coc.ops._salience import compute_salience_forward_reference, compute_salience_grad_reference


def compute_salience_reference(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> Tensor:
    """Scores how much each patch stands out by its edges, colour and features.

    w_E E + w_C C + w_F F with the weights divided by their sum, and

    - E = m / (m + 0.1), where m is the patch's mean of sqrt(gx^2 + gy^2 + 1e-8);
    - C = d / (d + 25), where d is the mean L2 distance of the patch's mean colour from its up to 8 neighbours'; 0 if
      the image is one patch;
    - F = (1 - cos(f, mean of the sample's features)) / 2, norms clamped at 1e-12.

    Every term depends on one sample only. The gradient of a distance between equal colours is 0.

    Args:
        features: One row for each patch, row by row of the grid of patches.
        lab: CIE LAB, L in 0 to 100.
        sobel_x: The horizontal derivative of the luminance.
        sobel_y: The vertical derivative of the luminance.
        patch_size: The side of a patch in pixels.
        weights: w_E, w_C, w_F: finite, at least 0, with a sum above 0.

    Returns:
        Values in [0, 1) up to rounding.
    """
    return compute_salience_forward_reference(features, lab, sobel_x, sobel_y, patch_size, weights)[0]


compute_salience = operator_like(compute_salience_reference)


compute_salience_forward = operator_like(compute_salience_forward_reference)
compute_salience_grad = operator_like(compute_salience_grad_reference)


def check_salience_weights(op: str, name: str, weights: Sequence[float]) -> None:
    """Checks that there are three weights with a positive sum."""
    check(len(weights) == 3, f"{op}: {name} must be 3 numbers, got {len(weights)}")
    listed = ", ".join(f"{weight:g}" for weight in weights)
    check(
        all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf,
        f"{op}: {name} must be finite and >= 0 with a sum > 0, got [{listed}]",
    )


def _with_gradient(*args: Any) -> Tensor:
    """Calls the operator that keeps statistics for the gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in args[:4]):
        return compute_salience_forward(*args)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return compute_salience(*args)


register_gradient("compute_salience_forward", compute_salience_grad)
torch.library.impl("arr_coc::compute_salience", "Autograd", _with_gradient)
register_no_second_derivative("compute_salience_grad")


def _inputs(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, columns: int, patch: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    normal = normals(device, dtype)
    size = (rows * patch, columns * patch)
    # Patches' colours differ by more than rounding, because the gradient of a distance changes its sign at zero.
    lab = normal(batch, 3, rows, columns, scale=20).repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    lab = lab + normal(batch, 3, *size, scale=5)
    sobel_x, sobel_y = (normal(batch, 1, *size, scale=0.1) for _ in range(2))
    return normal(batch, rows * columns, width) + 0.5, lab, sobel_x, sobel_y, patch


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    calls = [(2, 2, 3, 2, 8), (3, 4, 2, 2, 8), (1, 3, 3, 1, 5), (5, 5, 3, 3, 33), (0, 2, 2, 2, 4), (2, 0, 2, 2, 4)]
    calls += [(2, 1, 4, 3, 3), (2, 5, 1, 2, 1), (2, 2, 2, 14, 1030), (1, 13, 11, 4, 40), (1, 2, 1, 37, 2)]
    for sizes in calls:
        yield Sample("B, h, w, P, D = {}, {}, {}, {}, {}".format(*sizes), _inputs(device, dtype, *sizes))
    for weights in [(1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 0.5), (3.0, 4.0, 5.0)]:
        yield Sample(f"weights {weights}", (*_inputs(device, dtype, 2, 3, 2, 2, 6), weights))
    features, lab, *sobels, patch = _inputs(device, dtype, 2, 3, 3, 2, 6)
    lab[0, 1, 0, 0] = features[1, 3, 2] = torch.nan
    yield Sample("NaN in a corner's colour and in a row", (features, lab, *sobels, patch))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for index, sample in enumerate(_samples(device, dtype)):
        features, lab, sobel_x, sobel_y, patch, weights = (*sample.args, (0.5, 0.25, 0.25))[:6]
        _, *statistics = compute_salience_forward_reference(features, lab, sobel_x, sobel_y, patch, weights)
        grad = torch.randn(features.shape[:2], device=device, dtype=dtype)
        needs = (True,) * 4 if index < 5 else tuple(index % 5 != i for i in range(4))
        yield Sample(sample.label, (grad, features, sobel_x, sobel_y, *statistics, patch, weights, *needs))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, lab, gx, gy, p = _inputs(device, torch.float32, 2, 2, 3, 4, 8)
    yield Refusal("two weights", (x, lab, gx, gy, p, (1.0, 2.0)), "weights must be 3 numbers, got 2")
    for weights in [(0.0, 0.0, 0.0), (1.0, -0.5, 1.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)]:
        listed = ", ".join(f"{w:g}" for w in weights)
        yield Refusal(f"weights {weights}", (x, lab, gx, gy, p, weights), rf"sum > 0, got \[{listed}\]")


SPEC = ArrCocSpec(
    wrapper=compute_salience,
    reference=compute_salience_reference,
    layout=Layout(
        inputs={"features": "B N D", "lab": "B 3 H W", "sobel_x": "B 1 H W", "sobel_y": "B 1 H W"},
        outputs=["B N"],
        least={"D": 1},
        numbers={"patch_size": ">= 1"},
        derived={"N": ("the grid of patches", "(H/patch_size) * (W/patch_size)")},
        further=lambda op, weights, **_: check_salience_weights(op, "weights", weights),
    ),
    static=("D",),
    samples=_samples,
    more_refusals=_refusals,
    differentiable=("features", "lab", "sobel_x", "sobel_y"),
    autocast="float32",
)
FORWARD_SPEC = replace(
    SPEC,
    wrapper=compute_salience_forward,
    reference=compute_salience_forward_reference,
    layout=replace(SPEC.layout, outputs=["B N", "B D: accumulated", "B 1: accumulated", "B 7 N: accumulated"]),
)
GRAD_SPEC = ArrCocSpec(
    wrapper=compute_salience_grad,
    reference=compute_salience_grad_reference,
    layout=replace(
        SPEC.layout,
        inputs={
            "features": "B N D",
            "sobel_x": "B 1 H W",
            "sobel_y": "B 1 H W",
            "mean_unit": "B D of features: accumulated",
            "mean_norm": "B 1 of features: accumulated",
            "patches": "B 7 N of features: accumulated",
            "grad": "B N",
        },
        outputs=[
            "like features if need_features",
            "B 3 H W if need_lab",
            "like sobel_x if need_sobel_x",
            "like sobel_y if need_sobel_y",
        ],
    ),
    samples=_grad_samples,
    autocast=None,  # the forward call's statistics are wider than the inputs
)
