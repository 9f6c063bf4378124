"""Perspectival knowing: what stands out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._reference import NORM_FLOOR, accumulated, norm, unit
from exportkit.ops._spec import OpSpec, Refusal, Sample

_compute_salience = operator("compute_salience")
_compute_salience_grad = operator("compute_salience_grad")

# Edge strength and colour contrast that count as half salient, and what keeps the gradient magnitude smooth at zero.
_EDGE_HALF, _CONTRAST_HALF, _EDGE_FLOOR = 0.1, 25.0, 1e-8
_AROUND = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]


def compute_salience(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> Tensor:
    """How much each patch stands out: by its edges, its colour and its features.

    w_E E + w_C C + w_F F with the weights divided by their sum, and

    - E = m / (m + 0.1), m the patch's mean of sqrt(gx^2 + gy^2 + 1e-8);
    - C = d / (d + 25), d the L2 distance between this patch's mean colour and a neighbour's, meaned over the up to 8
      patches around it; 0 where the image is one patch;
    - F = (1 - cos(f, mean of the sample's features)) / 2, norms clamped at 1e-12.

    Every term is per sample. The gradient of a distance between equal colours is 0.

    Args:
        features: [B, N, D], floating, N = (H / P) (W / P) patches, row by row.
        lab: [B, 3, H, W], CIE LAB, L in 0 to 100; of the dtype and device of `features`.
        sobel_x: [B, 1, H, W], horizontal derivative of the luminance; likewise.
        sobel_y: [B, 1, H, W], vertical derivative; likewise.
        patch_size: P, in pixels.
        weights: w_E, w_C, w_F: finite, at least 0, their sum above 0.

    Returns:
        [B, N] in [0, 1) up to rounding, in the dtype of `features`.

    Raises:
        RuntimeError: Wrong rank, sizes, dtype or device; D = 0; H or W not a multiple of P; weights out of range.
    """
    return _compute_salience(features, lab, sobel_x, sobel_y, patch_size, weights)


def _normalised(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def _patch_means(planes: Tensor, patch_size: int) -> Tensor:
    """[B, C, H, W] -> [B, C, H / P, W / P]."""
    batch, channels, height, width = planes.shape
    blocks = (batch, channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return planes.reshape(blocks).mean((3, 5))


def _over_patches(means: Tensor, patch_size: int) -> Tensor:
    """The adjoint of `_patch_means`: [B, C, h, w] / P^2, repeated over each patch's pixels."""
    batch, channels, rows, columns = means.shape
    blocks = means[:, :, :, None, :, None].expand(-1, -1, -1, patch_size, -1, patch_size)
    return blocks.reshape(batch, channels, rows * patch_size, columns * patch_size) / patch_size**2


def _shifted(planes: Tensor, dy: int, dx: int) -> Tensor:
    """planes[..., i + dy, j + dx], zero outside."""
    rows, columns = planes.shape[-2:]
    padded = torch.nn.functional.pad(planes, (1, 1, 1, 1))
    return padded[..., 1 + dy : rows + 1 + dy, 1 + dx : columns + 1 + dx]


def _neighbour_distances(colours: Tensor) -> tuple[list[Tensor], Tensor]:
    """Distances [B, h, w] to each of the 8 neighbours, 0 where there is none, and how many there are [h, w]."""
    exists = colours.new_ones(colours.shape[-2:])
    inside = [_shifted(exists, dy, dx) for dy, dx in _AROUND]
    distances = [
        torch.where(here > 0, torch.linalg.vector_norm(colours - _shifted(colours, dy, dx), dim=1), 0)
        for here, (dy, dx) in zip(inside, _AROUND)
    ]
    return distances, torch.stack(inside).sum(0)


def _magnitudes(sobel_x: Tensor, sobel_y: Tensor) -> Tensor:
    return torch.sqrt(sobel_x**2 + sobel_y**2 + _EDGE_FLOOR)


def compute_salience_reference(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> Tensor:
    """`compute_salience` in ATen."""
    x, colours, gx, gy = (accumulated(t) for t in (features, lab, sobel_x, sobel_y))
    w_e, w_c, w_f = _normalised(weights)
    m = _patch_means(_magnitudes(gx, gy), patch_size).flatten(1)
    distances, neighbours = _neighbour_distances(_patch_means(colours, patch_size))
    d = (sum(distances) / neighbours.clamp(min=1)).flatten(1)
    cosine = (unit(x) * unit(x.mean(1, keepdim=True))).sum(-1)
    salience = w_e * m / (m + _EDGE_HALF) + w_c * d / (d + _CONTRAST_HALF) + w_f * (1 - cosine) / 2
    return salience.to(features.dtype)


def compute_salience_grad(
    grad: Tensor,
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float],
    need_features: bool,
    need_lab: bool,
    need_sobel_x: bool,
    need_sobel_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `compute_salience`.

    Args:
        grad: [B, N], of the dtype and device of `features`.
        features: [B, N, D].
        lab: [B, 3, H, W].
        sobel_x: [B, 1, H, W].
        sobel_y: [B, 1, H, W].
        patch_size: P, in pixels.
        weights: As in the forward.
        need_features: Whether to compute this gradient; one that is not needed is returned with shape [0].
        need_lab: Likewise.
        need_sobel_x: Likewise.
        need_sobel_y: Likewise.

    Returns:
        Gradients of features, lab, sobel_x and sobel_y, each of its argument's shape.
    """
    return _compute_salience_grad(
        grad, features, lab, sobel_x, sobel_y, patch_size, weights,
        need_features, need_lab, need_sobel_x, need_sobel_y,
    )  # fmt: skip


def _features_grad(slope: Tensor, features: Tensor) -> Tensor:
    """From the gradient of the cosines [B, N] to that of the features."""
    x, mean = features, features.mean(1, keepdim=True)
    along = (unit(x) * unit(mean)).sum(-1, keepdim=True)
    own = unit(mean) - torch.where(norm(x) >= NORM_FLOOR, along * unit(x), 0)
    own = slope.unsqueeze(-1) * own / norm(x).clamp(min=NORM_FLOOR)
    of_unit = (slope.unsqueeze(-1) * unit(x)).sum(1, keepdim=True)
    along = (of_unit * unit(mean)).sum(-1, keepdim=True) * unit(mean)
    of_mean = (of_unit - torch.where(norm(mean) >= NORM_FLOOR, along, 0)) / norm(mean).clamp(min=NORM_FLOOR)
    return own + of_mean / max(x.shape[1], 1)


def _colours_grad(upstream: Tensor, colours: Tensor) -> Tensor:
    """From the gradient of C [B, h, w] to that of the patches' mean colours [B, 3, h, w]."""
    distances, neighbours = _neighbour_distances(colours)
    count = neighbours.clamp(min=1)
    slope = upstream * _CONTRAST_HALF / (sum(distances) / count + _CONTRAST_HALF) ** 2 / count
    exists = colours.new_ones(colours.shape[-2:])
    gradient = torch.zeros_like(colours)
    for distance, (dy, dx) in zip(distances, _AROUND):
        both = (slope + _shifted(slope, dy, dx)).unsqueeze(1)
        direction = (colours - _shifted(colours, dy, dx)) / distance.unsqueeze(1)
        counts = (_shifted(exists, dy, dx) > 0) & (distance.unsqueeze(1) != 0)
        gradient = gradient + torch.where(counts, both * direction, 0)
    return gradient


def compute_salience_grad_reference(
    grad: Tensor,
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float],
    need_features: bool,
    need_lab: bool,
    need_sobel_x: bool,
    need_sobel_y: bool,
) -> tuple[Tensor, ...]:
    """`compute_salience_grad` in ATen."""
    g, x, colours, gx, gy = (accumulated(t) for t in (grad, features, lab, sobel_x, sobel_y))
    w_e, w_c, w_f = _normalised(weights)
    g_patches = g.reshape(lab.shape[0], lab.shape[2] // patch_size, lab.shape[3] // patch_size)
    magnitudes = _magnitudes(gx, gy)
    edge_slope = w_e * g_patches.unsqueeze(1) * _EDGE_HALF / (_patch_means(magnitudes, patch_size) + _EDGE_HALF) ** 2
    per_pixel = _over_patches(edge_slope, patch_size) / magnitudes
    colour_means = _patch_means(colours, patch_size)
    gradients = (
        (need_features, lambda: _features_grad(-w_f * g / 2, x)),
        (
            need_lab,
            lambda: _over_patches(_colours_grad(w_c * g_patches, colour_means), patch_size),
        ),
        (need_sobel_x, lambda: per_pixel * gx),
        (need_sobel_y, lambda: per_pixel * gy),
    )
    return tuple(f().to(features.dtype) if need else features.new_empty(0) for need, f in gradients)


def check_salience_weights(op: str, name: str, weights: Sequence[float]) -> None:
    """Three numbers that can be normalised by their sum."""
    check(len(weights) == 3, f"{op}: {name} must be 3 numbers, got {len(weights)}")
    listed = ", ".join(f"{weight:g}" for weight in weights)
    check(
        all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf,
        f"{op}: {name} must be finite and >= 0 with a sum > 0, got [{listed}]",
    )


@torch.library.register_fake("arr_coc::compute_salience")
def _compute_salience_fake(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> Tensor:
    op = "compute_salience"
    check_rank(op, "features", features, 3, "[B, N, D]")
    check_floating(op, "features", features)
    check(features.shape[2] > 0, f"{op}: features must have D >= 1, got shape {shape_of(features)}")
    check(lab.dim() == 4 and lab.shape[1] == 3, f"{op}: lab must be [B, 3, H, W], got shape {shape_of(lab)}")
    check_alike(op, "features", features, "lab", lab)
    check_same_size(op, "B", "lab", lab.shape[0], "features", features.shape[0])
    for name, sobel in (("sobel_x", sobel_x), ("sobel_y", sobel_y)):
        is_plane = sobel.dim() == 4 and sobel.shape[1] == 1
        check(is_plane, f"{op}: {name} must be [B, 1, H, W], got shape {shape_of(sobel)}")
        check_alike(op, "features", features, name, sobel)
        check_same_size(op, "B", name, sobel.shape[0], "features", features.shape[0])
        check_same_size(op, "H", name, sobel.shape[2], "lab", lab.shape[2])
        check_same_size(op, "W", name, sobel.shape[3], "lab", lab.shape[3])
    check(patch_size > 0, f"{op}: patch_size must be >= 1, got {patch_size}")
    for symbol, size in (("H", lab.shape[2]), ("W", lab.shape[3])):
        check(size % patch_size == 0, f"{op}: {symbol} = {size} is not a multiple of patch_size = {patch_size}")
    patches = (lab.shape[2] // patch_size) * (lab.shape[3] // patch_size)
    check_same_size(op, "N", "features", features.shape[1], "the grid of patches", patches)
    check_salience_weights(op, "weights", weights)
    return features.new_empty(features.shape[:2])


@torch.library.register_fake("arr_coc::compute_salience_grad")
def _compute_salience_grad_fake(
    grad: Tensor,
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float],
    need_features: bool,
    need_lab: bool,
    need_sobel_x: bool,
    need_sobel_y: bool,
) -> tuple[Tensor, ...]:
    op = "compute_salience_grad"
    _compute_salience_fake(features, lab, sobel_x, sobel_y, patch_size, weights)
    check_rank(op, "grad", grad, 2, "[B, N]")
    check_alike(op, "features", features, "grad", grad)
    check_same_size(op, "B", "grad", grad.shape[0], "features", features.shape[0])
    check_same_size(op, "N", "grad", grad.shape[1], "features", features.shape[1])
    inputs = (features, lab, sobel_x, sobel_y)
    needs = (need_features, need_lab, need_sobel_x, need_sobel_y)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(inputs, needs))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.patch_size, ctx.weights = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:4]
    arguments = (grad, *ctx.saved_tensors, ctx.patch_size, ctx.weights, *needs)
    gradients = compute_salience_grad(*arguments)
    return *(g if need else None for g, need in zip(gradients, needs)), None, None


torch.library.register_autograd("arr_coc::compute_salience", _backward, setup_context=_setup_context)
register_no_second_derivative("compute_salience_grad")


def _inputs(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, columns: int, patch: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    size = (rows * patch, columns * patch)
    # Colours of patches differ by more than their rounding: the gradient of a distance turns around at zero.
    lab = normal(batch, 3, rows, columns, scale=20).repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    lab = lab + normal(batch, 3, *size, scale=5)
    sobel_x, sobel_y = (normal(batch, 1, *size, scale=0.1) for _ in range(2))
    return normal(batch, rows * columns, width) + 0.5, lab, sobel_x, sobel_y, patch


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sizes in [
        (2, 2, 3, 2, 8),
        (3, 4, 2, 2, 8),
        (1, 3, 3, 1, 5),
        (5, 5, 3, 3, 33),
        (0, 2, 2, 2, 4),
        (2, 0, 2, 2, 4),
        (2, 1, 4, 3, 3),
        (2, 5, 1, 2, 1),
        (2, 2, 2, 14, 1030),
        (1, 13, 11, 4, 40),
        (1, 2, 1, 37, 2),
    ]:
        yield Sample("B, h, w, P, D = {}, {}, {}, {}, {}".format(*sizes), _inputs(device, dtype, *sizes))
    for weights in [(1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 0.5), (3.0, 4.0, 5.0)]:
        yield Sample(f"weights {weights}", (*_inputs(device, dtype, 2, 3, 2, 2, 6), weights))
    features, lab, *sobels, patch = _inputs(device, dtype, 2, 3, 3, 2, 6)
    lab[0, 1, 0, 0] = features[1, 3, 2] = torch.nan
    yield Sample("NaN in a corner's colour and in a row", (features, lab, *sobels, patch))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for index, sample in enumerate(_samples(device, dtype)):
        features, *others, patch, weights = (*sample.args, (0.5, 0.25, 0.25))[:6]
        grad = torch.randn(features.shape[:2], device=device, dtype=dtype)
        needs = (True,) * 4 if index < 5 else tuple(index % 5 != i for i in range(4))
        yield Sample(sample.label, (grad, features, *others, patch, weights, *needs))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, lab, gx, gy, p = _inputs(device, torch.float32, 2, 2, 3, 4, 8)
    yield Refusal("rank 2", (x[0], lab, gx, gy, p), r"features must be \[B, N, D\], got shape \[6, 8\]")
    yield Refusal("int64", (x.long(), lab, gx, gy, p), "features must be float32.* got int64")
    yield Refusal("D = 0", (x[..., :0], lab, gx, gy, p), r"D >= 1, got shape \[2, 6, 0\]")
    yield Refusal("two channels", (x, lab[:, :2], gx, gy, p), r"lab must be \[B, 3, H, W\], got shape \[2, 2, 8, 12\]")
    yield Refusal("lab of other dtype", (x, lab.half(), gx, gy, p), "lab is float16, features is float32")
    yield Refusal("lab of other B", (x, lab[:1], gx, gy, p), "lab has B = 1, features has B = 2")
    yield Refusal(
        "sobel_x of rank 3", (x, lab, gx[:, 0], gy, p), r"sobel_x must be \[B, 1, H, W\], got shape \[2, 8, 12\]"
    )
    yield Refusal("sobel_y of other H", (x, lab, gx, gy[:, :, :4], p), "sobel_y has H = 4, lab has H = 8")
    yield Refusal("sobel_y of other W", (x, lab, gx, gy[..., :4], p), "sobel_y has W = 4, lab has W = 12")
    yield Refusal("patch_size 0", (x, lab, gx, gy, 0), "patch_size must be >= 1, got 0")
    yield Refusal("H not a multiple", (x, lab, gx, gy, 3), "H = 8 is not a multiple of patch_size = 3")
    yield Refusal("W not a multiple", (x, lab, gx, gy, 8), "W = 12 is not a multiple of patch_size = 8")
    yield Refusal("other N", (x, lab, gx, gy, 2), "features has N = 6, the grid of patches has N = 24")
    yield Refusal("two weights", (x, lab, gx, gy, p, (1.0, 2.0)), "weights must be 3 numbers, got 2")
    for weights in [(0.0, 0.0, 0.0), (1.0, -0.5, 1.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)]:
        listed = ", ".join(f"{w:g}" for w in weights)
        yield Refusal(f"weights {weights}", (x, lab, gx, gy, p, weights), rf"sum > 0, got \[{listed}\]")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, lab, gx, gy, p = _inputs(device, torch.float32, 2, 2, 3, 4, 8)
    grad, rest = x[..., 0], ((1.0, 1.0, 1.0), True, True, True, True)
    yield Refusal("grad of other B", (grad[:1], x, lab, gx, gy, p, *rest), "grad has B = 1, features has B = 2")
    yield Refusal("grad of other N", (grad[:, :1], x, lab, gx, gy, p, *rest), "grad has N = 1, features has N = 6")
    yield Refusal(
        "grad of other dtype", (grad.double(), x, lab, gx, gy, p, *rest), "grad is float64, features is float32"
    )
    yield Refusal("patch_size 0", (grad, x, lab, gx, gy, 0, *rest), "patch_size must be >= 1, got 0")


_IMAGE = {0: "B", 2: "H", 3: "W"}
_DYNAMIC = {"features": {0: "B", 1: "N"}, "lab": _IMAGE, "sobel_x": _IMAGE, "sobel_y": _IMAGE}
SPEC = OpSpec(
    name="compute_salience",
    wrapper=compute_salience,
    reference=compute_salience_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("features", "lab", "sobel_x", "sobel_y"),
    dynamic=_DYNAMIC,
    autocast="float32",
)
GRAD_SPEC = OpSpec(
    name="compute_salience_grad",
    wrapper=compute_salience_grad,
    reference=compute_salience_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={"grad": {0: "B", 1: "N"}, **_DYNAMIC},
)
