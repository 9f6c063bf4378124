"""Colour and edges: CIE LAB and the Sobel gradients of an image, which is read once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_no_second_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated

LUMA = (0.299, 0.587, 0.114)  # Rec. 601
XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE = (0.95047, 1.0, 1.08883)  # D65
LINEAR_KNEE = 0.04045
COMPRESS_KNEE = 0.008856


def _mixed(channels: Tensor, rows: tuple[tuple[float, ...], ...]) -> Tensor:
    """Multiplies the channels of [B, 3, H, W] by a 3 x 3 matrix."""
    c0, c1, c2 = channels.unbind(1)
    return torch.stack([row[0] * c0 + row[1] * c1 + row[2] * c2 for row in rows], 1)


def _scaled(channels: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Multiplies each of three channels by its factor."""
    return torch.stack([factor * channel for factor, channel in zip(factors, channels.unbind(1))], 1)


def _linear(rgb: Tensor) -> Tensor:
    # The power's base is clamped, because a negative base gives NaN, also in the gradient of where().
    base = (rgb.clamp(min=LINEAR_KNEE) + 0.055) / 1.055
    return torch.where(rgb <= LINEAR_KNEE, rgb / 12.92, base**2.4)


def _white_relative_xyz(rgb: Tensor) -> Tensor:
    return _scaled(_mixed(_linear(rgb), XYZ), tuple(1 / white for white in WHITE))


def _neighbours(values: Tensor, dim: int, edge: float) -> tuple[Tensor, Tensor]:
    """Returns each value's neighbours along `dim` (-1 or -2); beyond the ends, `edge` times the end value."""
    along = values.transpose(dim, -1)
    before = torch.cat([edge * along[..., :1], along[..., :-1]], -1)
    after = torch.cat([along[..., 1:], edge * along[..., -1:]], -1)
    return before.transpose(dim, -1), after.transpose(dim, -1)


def _smoothed(values: Tensor, dim: int) -> Tensor:
    before, after = _neighbours(values, dim, 1.0)
    return before + 2 * values + after


def fused_texture_reference(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CIE LAB (D65) of an sRGB image, and the Sobel gradients of its luma.

    LAB as in IEC 61966-2-1 and CIE 15: linear light from the encoded values, XYZ relative to the white point, then
    L = 116 f(Y) - 16, a = 500 (f(X) - f(Y)), b = 200 (f(Y) - f(Z)), f the cube root with a straight piece near 0.
    Sobel on the luma Y' = 0.299 R + 0.587 G + 0.114 B of the encoded values (Rec. 601), with kernel
    [-1 0 1; -2 0 2; -1 0 1] / 8 and its transpose; beyond the border the nearest pixel is repeated.

    Args:
        rgb: Encoded sRGB in [0, 1]; finite values outside are allowed.

    Returns:
        lab: L in [0, 100], a and b within about [-110, 110] for colours of sRGB.
        sobel_x: The change of luma a pixel to the right.
        sobel_y: The change of luma a pixel down.
    """
    wide = accumulated(rgb)
    t = _white_relative_xyz(wide)
    root = t.clamp(min=COMPRESS_KNEE) ** (1 / 3)
    fx, fy, fz = torch.where(t <= COMPRESS_KNEE, 7.787 * t + 4 / 29, root).unbind(1)
    lab = torch.stack([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)], 1)
    r, g, b = wide.unbind(1)
    luma = (LUMA[0] * r + LUMA[1] * g + LUMA[2] * b).unsqueeze(1)
    left, right = _neighbours(luma, -1, 1.0)
    up, down = _neighbours(luma, -2, 1.0)
    sobel_x, sobel_y = _smoothed(right - left, -2) / 8, _smoothed(down - up, -1) / 8
    return lab.to(rgb.dtype).contiguous(), sobel_x.to(rgb.dtype).contiguous(), sobel_y.to(rgb.dtype).contiguous()


fused_texture = operator_like(fused_texture_reference)


def lab_to_rgb_grad_reference(rgb: Tensor, grad_lab: Tensor, grad_luma: Tensor | None = None) -> Tensor:
    """Gradient of `fused_texture`'s LAB, plus the gradient of its luma if given.

    dlin_c = sum_k M_kc / w_k f'(t_k) G_k with G_X = 500 g_a, G_Y = 116 g_L - 500 g_a + 200 g_b, G_Z = -200 g_b, times
    the slope of linear light over the encoded value, plus the luma's weight times its gradient.

    Args:
        rgb: The same as in the forward call.
        grad_lab: The gradient of LAB.
        grad_luma: The result of `sobel_grad`. It is added here, because a separate sum would read and write the whole
            gradient again.
    """
    wide, (grad_l, grad_a, grad_b) = accumulated(rgb), accumulated(grad_lab).unbind(1)
    t = _white_relative_xyz(wide)
    slope = torch.where(t <= COMPRESS_KNEE, 7.787, t.clamp(min=COMPRESS_KNEE) ** (-2 / 3) / 3)
    grad_f = torch.stack([500 * grad_a, 116 * grad_l - 500 * grad_a + 200 * grad_b, -200 * grad_b], 1)
    transposed = tuple(zip(*XYZ))
    grad_linear = _mixed(_scaled(slope * grad_f, tuple(1 / white for white in WHITE)), transposed)
    base = (wide.clamp(min=LINEAR_KNEE) + 0.055) / 1.055
    grad = grad_linear * torch.where(wide <= LINEAR_KNEE, 1 / 12.92, 2.4 / 1.055 * base**1.4)
    if grad_luma is not None:
        grad = grad + torch.cat([weight * accumulated(grad_luma) for weight in LUMA], 1)
    return grad.to(rgb.dtype)


def sobel_grad_reference(grad_x: Tensor, grad_y: Tensor) -> Tensor:
    """Gradient of `fused_texture`'s Sobel outputs with respect to the luma: their adjoint.

    For the repeated border, the adjoint continues a smoothed axis by its end value and a differenced axis by minus its
    end value.
    """
    wide_x, wide_y = accumulated(grad_x), accumulated(grad_y)
    left, right = _neighbours(_smoothed(wide_x, -2), -1, -1.0)
    up, down = _neighbours(_smoothed(wide_y, -1), -2, -1.0)
    return ((left - right + up - down) / 8).to(grad_x.dtype).contiguous()


lab_to_rgb_grad = operator_like(lab_to_rgb_grad_reference)
sobel_grad = operator_like(sobel_grad_reference)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # an unused output has the gradient None, which costs nothing
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_lab: Tensor | None, grad_x: Tensor | None, grad_y: Tensor | None) -> Tensor | None:
    (rgb,) = ctx.saved_tensors
    grad_luma = None
    if grad_x is not None:
        grad_luma = sobel_grad(grad_x, torch.zeros_like(grad_x) if grad_y is None else grad_y)
    elif grad_y is not None:
        grad_luma = sobel_grad(torch.zeros_like(grad_y), grad_y)
    if grad_lab is not None:
        return lab_to_rgb_grad(rgb, grad_lab, grad_luma)
    return None if grad_luma is None else torch.cat([weight * grad_luma for weight in LUMA], 1)


torch.library.register_autograd("arr_coc::fused_texture", _backward, setup_context=_setup_context)
register_no_second_derivative("lab_to_rgb_grad", "fused_texture")
register_no_second_derivative("sobel_grad", "fused_texture")

# The first sizes are exported; then those around the CUDA tile (256 x 4) and its vectors of four.
_SIZES = [(2, 6, 8), (1, 1, 1), (1, 1, 9), (1, 7, 1), (5, 3, 5), (2, 9, 260), (1, 4, 256), (1, 17, 257), (3, 4, 255)]
_EMPTY_SIZES = [(0, 4, 4), (2, 0, 4), (2, 4, 0)]


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for batch, height, width in _SIZES + _EMPTY_SIZES:
        # Beyond [0, 1] on both sides: both pieces of both curves.
        rgb = torch.rand(batch, 3, height, width, device=device, dtype=dtype) * 2 - 0.5
        yield Sample(f"rgb {list(rgb.shape)}", (rgb,))
    dark = torch.rand(2, 3, 5, 6, device=device, dtype=dtype) * 0.1
    yield Sample("dark", (dark,))
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], device=device, dtype=dtype)] * 3)
    yield Sample("the corners of the cube", (corners.T.reshape(1, 3, 2, 4),))


def _lab_to_rgb_grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sample in _samples(device, dtype):
        (rgb,) = sample.args
        grad_lab, grad_luma = torch.randn_like(rgb) / 100, torch.randn_like(rgb.sum(1, keepdim=True))
        yield Sample(sample.label, (rgb, grad_lab))
        yield Sample(f"{sample.label}, luma", (rgb, grad_lab, grad_luma))


def _sobel_grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for batch, height, width in _SIZES + _EMPTY_SIZES:
        grad_x, grad_y = torch.randn(2, batch, 1, height, width, device=device, dtype=dtype)
        yield Sample(f"grad_x {list(grad_x.shape)}", (grad_x, grad_y))


SPEC = ArrCocSpec(
    wrapper=fused_texture,
    reference=fused_texture_reference,
    layout=Layout(inputs={"rgb": "B 3 H W"}, outputs=["B 3 H W", "B 1 H W", "B 1 H W"]),
    samples=_samples,
    differentiable=("rgb",),
    # a and b are 500 and 200 times a difference of numbers near 1, so near 0 any float32 result has an error of 1e-4.
    tolerances={torch.float32: (1e-4, 3e-4)},
    autocast="float32",
)
LAB_GRAD_SPEC = ArrCocSpec(
    wrapper=lab_to_rgb_grad,
    reference=lab_to_rgb_grad_reference,
    layout=Layout(inputs={"rgb": "B 3 H W", "grad_lab": "B 3 H W", "grad_luma": "B 1 H W"}, outputs=["B 3 H W"]),
    samples=_lab_to_rgb_grad_samples,
    tolerances={torch.float32: (1e-4, 1e-4)},  # the samples' terms have both signs and reach several tens
)
SOBEL_GRAD_SPEC = ArrCocSpec(
    wrapper=sobel_grad,
    reference=sobel_grad_reference,
    layout=Layout(inputs={"grad_x": "B 1 H W", "grad_y": "B 1 H W"}, outputs=["B 1 H W"]),
    samples=_sobel_grad_samples,
)
