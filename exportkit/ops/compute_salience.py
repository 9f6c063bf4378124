"""Perspectival knowing: how much a patch stands out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_dtype, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._salience import compute_salience_forward_reference, compute_salience_grad_reference

_compute_salience = operator("compute_salience")
_compute_salience_forward = operator("compute_salience_forward")
_compute_salience_grad = operator("compute_salience_grad")


def compute_salience(
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
        features: [B, N, D], floating, N = (H / P) (W / P) patches, row by row.
        lab: [B, 3, H, W], CIE LAB, L in 0 to 100, with the dtype and device of `features`.
        sobel_x: [B, 1, H, W], horizontal derivative of the luminance, with the same dtype and device.
        sobel_y: [B, 1, H, W], vertical derivative of the luminance, with the same dtype and device.
        patch_size: P, in pixels.
        weights: w_E, w_C, w_F: finite, at least 0, with a sum above 0.

    Returns:
        [B, N] in [0, 1) up to rounding, in the dtype of `features`.

    Raises:
        RuntimeError: An argument has a wrong rank, size, dtype or device, D = 0, H or W is not a multiple of P, or the
            weights are out of range.
    """
    return _compute_salience(features, lab, sobel_x, sobel_y, patch_size, weights)


def compute_salience_forward(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `compute_salience` and statistics that its gradient would otherwise compute again from all inputs.

    Args:
        features: The same as for `compute_salience`.
        lab: The same as for `compute_salience`.
        sobel_x: The same as for `compute_salience`.
        sobel_y: The same as for `compute_salience`.
        patch_size: The same as for `compute_salience`.
        weights: The same as for `compute_salience`.

    Returns:
        The salience [B, N]. The rest is float32 (float64 for float64): the mean of each sample's features divided by
        its norm [B, D], that norm [B, 1] (both 0 if N = 0), and for each patch [B, 6, N] the norm of its features,
        their cosine with the mean, the mean edge strength, and the mean L, a and b.

    Raises:
        RuntimeError: The same as for `compute_salience`.
    """
    return _compute_salience_forward(features, lab, sobel_x, sobel_y, patch_size, weights)


def compute_salience_reference(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> Tensor:
    """Computes `compute_salience` in ATen."""
    return compute_salience_forward_reference(features, lab, sobel_x, sobel_y, patch_size, weights)[0]


def compute_salience_grad(
    grad: Tensor,
    features: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    mean_unit: Tensor,
    mean_norm: Tensor,
    patches: Tensor,
    patch_size: int,
    weights: Sequence[float],
    need_features: bool,
    need_lab: bool,
    need_sobel_x: bool,
    need_sobel_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `compute_salience`.

    Args:
        grad: [B, N], with the dtype and device of `features`.
        features: [B, N, D].
        sobel_x: [B, 1, H, W].
        sobel_y: [B, 1, H, W].
        mean_unit: [B, D], from `compute_salience_forward`.
        mean_norm: [B, 1], from `compute_salience_forward`.
        patches: [B, 6, N], from `compute_salience_forward`.
        patch_size: P, in pixels.
        weights: The same as in the forward call.
        need_features: Whether to compute the gradient of `features`. A gradient that is not computed has shape [0].
        need_lab: Whether to compute the gradient of `lab`.
        need_sobel_x: Whether to compute the gradient of `sobel_x`.
        need_sobel_y: Whether to compute the gradient of `sobel_y`.

    Returns:
        Gradients of features, lab, sobel_x and sobel_y, each with its argument's shape.
    """
    return _compute_salience_grad(
        grad, features, sobel_x, sobel_y, mean_unit, mean_norm, patches, patch_size, weights,
        need_features, need_lab, need_sobel_x, need_sobel_y,
    )  # fmt: skip


def check_salience_weights(op: str, name: str, weights: Sequence[float]) -> None:
    """Checks that there are three weights with a positive sum."""
    check(len(weights) == 3, f"{op}: {name} must be 3 numbers, got {len(weights)}")
    listed = ", ".join(f"{weight:g}" for weight in weights)
    check(
        all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf,
        f"{op}: {name} must be finite and >= 0 with a sum > 0, got [{listed}]",
    )


def _check_features(op: str, features: Tensor) -> None:
    check_rank(op, "features", features, 3, "[B, N, D]")
    check_floating(op, "features", features)
    check(features.shape[2] > 0, f"{op}: features must have D >= 1, got shape {shape_of(features)}")


def _check_sobel(op: str, name: str, sobel: Tensor, features: Tensor, image_name: str, image: Tensor) -> None:
    is_plane = sobel.dim() == 4 and sobel.shape[1] == 1
    check(is_plane, f"{op}: {name} must be [B, 1, H, W], got shape {shape_of(sobel)}")
    check_alike(op, "features", features, name, sobel)
    check_same_size(op, "B", name, sobel.shape[0], "features", features.shape[0])
    check_same_size(op, "H", name, sobel.shape[2], image_name, image.shape[2])
    check_same_size(op, "W", name, sobel.shape[3], image_name, image.shape[3])


def _check_patches(op: str, features: Tensor, image: Tensor, patch_size: int, weights: Sequence[float]) -> None:
    check(patch_size > 0, f"{op}: patch_size must be >= 1, got {patch_size}")
    for symbol, size in (("H", image.shape[2]), ("W", image.shape[3])):
        check(size % patch_size == 0, f"{op}: {symbol} = {size} is not a multiple of patch_size = {patch_size}")
    patches = (image.shape[2] // patch_size) * (image.shape[3] // patch_size)
    check_same_size(op, "N", "features", features.shape[1], "the grid of patches", patches)
    check_salience_weights(op, "weights", weights)


def _statistics_dtype(features: Tensor) -> torch.dtype:
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def _check_inputs(
    op: str,
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float],
) -> None:
    _check_features(op, features)
    check(lab.dim() == 4 and lab.shape[1] == 3, f"{op}: lab must be [B, 3, H, W], got shape {shape_of(lab)}")
    check_alike(op, "features", features, "lab", lab)
    check_same_size(op, "B", "lab", lab.shape[0], "features", features.shape[0])
    _check_sobel(op, "sobel_x", sobel_x, features, "lab", lab)
    _check_sobel(op, "sobel_y", sobel_y, features, "lab", lab)
    _check_patches(op, features, lab, patch_size, weights)


@torch.library.register_fake("arr_coc::compute_salience")
def _compute_salience_fake(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> Tensor:
    _check_inputs("compute_salience", features, lab, sobel_x, sobel_y, patch_size, weights)
    return features.new_empty(features.shape[:2])


@torch.library.register_fake("arr_coc::compute_salience_forward")
def _compute_salience_forward_fake(
    features: Tensor,
    lab: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    patch_size: int,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
) -> tuple[Tensor, ...]:
    _check_inputs("compute_salience_forward", features, lab, sobel_x, sobel_y, patch_size, weights)
    batch, count, width = features.shape
    sizes = ((batch, width), (batch, 1), (batch, 6, count))
    statistics = (features.new_empty(size, dtype=_statistics_dtype(features)) for size in sizes)
    return features.new_empty((batch, count)), *statistics


@torch.library.register_fake("arr_coc::compute_salience_grad")
def _compute_salience_grad_fake(
    grad: Tensor,
    features: Tensor,
    sobel_x: Tensor,
    sobel_y: Tensor,
    mean_unit: Tensor,
    mean_norm: Tensor,
    patches: Tensor,
    patch_size: int,
    weights: Sequence[float],
    need_features: bool,
    need_lab: bool,
    need_sobel_x: bool,
    need_sobel_y: bool,
) -> tuple[Tensor, ...]:
    op = "compute_salience_grad"
    _check_features(op, features)
    _check_sobel(op, "sobel_x", sobel_x, features, "sobel_x", sobel_x)
    _check_sobel(op, "sobel_y", sobel_y, features, "sobel_x", sobel_x)
    _check_patches(op, features, sobel_x, patch_size, weights)
    batch, count, width = features.shape
    for name, statistic, layout, sizes in (
        ("mean_unit", mean_unit, "[B, D]", (batch, width)),
        ("mean_norm", mean_norm, "[B, 1]", (batch, 1)),
        ("patches", patches, "[B, 6, N]", (batch, 6, count)),
    ):
        check_dtype(op, name, statistic, _statistics_dtype(features))
        check(statistic.device == features.device, f"{op}: {name} and features must be on one device")
        other = f"{op}: {name} must be {layout} of features {shape_of(features)}, got shape {shape_of(statistic)}"
        check(statistic.dim() == len(sizes), other)
        for size, expected in zip(statistic.shape, sizes):
            check(size == expected, other)
    check_rank(op, "grad", grad, 2, "[B, N]")
    check_alike(op, "features", features, "grad", grad)
    check_same_size(op, "B", "grad", grad.shape[0], "features", batch)
    check_same_size(op, "N", "grad", grad.shape[1], "features", count)
    lab = (sobel_x.shape[0], 3, *sobel_x.shape[2:])
    shapes = (features.shape, lab, sobel_x.shape, sobel_y.shape)
    needs = (need_features, need_lab, need_sobel_x, need_sobel_y)
    return tuple(features.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    features, _, sobel_x, sobel_y, ctx.patch_size, ctx.weights = inputs
    _, *statistics = output
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(features, sobel_x, sobel_y, *statistics)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    needs = ctx.needs_input_grad[:4]
    arguments = (grad, *ctx.saved_tensors, ctx.patch_size, ctx.weights, *needs)
    gradients = compute_salience_grad(*arguments)
    return *(g if need else None for g, need in zip(gradients, needs)), None, None


def _with_gradient(*args: Any) -> Tensor:
    """Calls the operator that keeps statistics for the gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in args[:4]):
        return _compute_salience_forward(*args)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return _compute_salience(*args)


torch.library.register_autograd("arr_coc::compute_salience_forward", _backward, setup_context=_setup_context)
torch.library.impl("arr_coc::compute_salience", "Autograd", _with_gradient)
register_no_second_derivative("compute_salience_grad")


def _inputs(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, columns: int, patch: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    size = (rows * patch, columns * patch)
    # Patches' colours differ by more than rounding, because the gradient of a distance changes its sign at zero.
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
        features, lab, sobel_x, sobel_y, patch, weights = (*sample.args, (0.5, 0.25, 0.25))[:6]
        _, *statistics = compute_salience_forward_reference(features, lab, sobel_x, sobel_y, patch, weights)
        grad = torch.randn(features.shape[:2], device=device, dtype=dtype)
        needs = (True,) * 4 if index < 5 else tuple(index % 5 != i for i in range(4))
        yield Sample(sample.label, (grad, features, sobel_x, sobel_y, *statistics, patch, weights, *needs))


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
    _, mean_unit, mean_norm, patches = compute_salience_forward_reference(x, lab, gx, gy, p)
    valid: dict[str, Any] = {"grad": x[..., 0], "features": x, "sobel_x": gx, "sobel_y": gy}
    valid |= {"mean_unit": mean_unit, "mean_norm": mean_norm, "patches": patches, "patch_size": p}

    def refusal(message: str, **changed: Any) -> Refusal:
        return Refusal(message, (*{**valid, **changed}.values(), (1.0, 1.0, 1.0), True, True, True, True), message)

    yield refusal("grad has B = 1, features has B = 2", grad=x[:1, :, 0])
    yield refusal("grad has N = 1, features has N = 6", grad=x[:, :1, 0])
    yield refusal("grad is float64, features is float32", grad=x[..., 0].double())
    yield refusal("features must be float32.* got int64", features=x.long())
    yield refusal("sobel_y has H = 4, sobel_x has H = 8", sobel_y=gy[:, :, :4])
    yield refusal("patch_size must be >= 1, got 0", patch_size=0)
    yield refusal("H = 8 is not a multiple of patch_size = 3", patch_size=3)
    yield refusal("mean_norm must be float32, got float64", mean_norm=mean_norm.double())
    of = r"of features \[2, 6, 8\], got shape"
    yield refusal(rf"mean_unit must be \[B, D\] {of} \[2, 4\]", mean_unit=mean_unit[:, :4])
    yield refusal(rf"patches must be \[B, 6, N\] {of} \[2, 5, 6\]", patches=patches[:, :5])


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
FORWARD_SPEC = replace(
    SPEC,
    name="compute_salience_forward",
    wrapper=compute_salience_forward,
    reference=compute_salience_forward_reference,
)
GRAD_SPEC = OpSpec(
    name="compute_salience_grad",
    wrapper=compute_salience_grad,
    reference=compute_salience_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={
        "grad": {0: "B", 1: "N"},
        **{name: dims for name, dims in _DYNAMIC.items() if name != "lab"},
        "mean_unit": {0: "B"},
        "mean_norm": {0: "B"},
        "patches": {0: "B", 2: "N"},
    },
    autocast=None,  # the forward call's statistics are wider than the inputs
)
