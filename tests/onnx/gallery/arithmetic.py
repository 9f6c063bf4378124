"""Modules that compute with numbers at their limits: signs, halves, overflows, NaN, infinities."""

import torch
from torch import Tensor, nn


class IntegerTimesConstant(nn.Module):
    """Integers times a Python number (norse#447)."""

    inputs = ("x=int64[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.mul.Scalar(x, 3), torch.ops.aten.mul.Scalar(x, 2.5)


class NegativeDivision(nn.Module):
    """The quotient and remainder of negative integers."""

    inputs = ("x=int64[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x % 11 - 5
        quotients = [torch.div(y, by, rounding_mode=mode) for by in (3, -3) for mode in ("floor", "trunc")]
        return [*quotients, *(f(y, by) for by in (3, -3) for f in (torch.remainder, torch.fmod, torch.floor_divide))]


class LargeIntegers(nn.Module):
    """Integers that no float32 holds: torch.onnx divides by way of float32."""

    inputs = ("x=int64[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x + 2**53
        divided = [torch.div(y, 3, rounding_mode="trunc"), torch.div(y, -3, rounding_mode="floor")]
        return [*divided, y.sum(0), y.sum(), y.prod(1), y.cumsum(0), y % 1000]


class RemainderOfFloats(nn.Module):
    """The quotient and remainder of negative floats (onnxscript#989)."""

    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = (x * 8).round() / 4
        return [f(y, by) for by in (0.75, -2.5) for f in (torch.remainder, torch.fmod, torch.floor_divide)]


class HalvesRounded(nn.Module):
    """Numbers halfway between two others: torch rounds to even."""

    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = (x * 4).round() / 2
        return [y.round(), y.floor(), y.ceil(), y.trunc(), y.frac(), y.round(decimals=1), y.to(torch.int32)]


class Overflow(nn.Module):
    """Integers beyond their dtype, which wrap around."""

    inputs = ("x=int32[4,3]", "y=int8[4,3]")
    dynamic = ("x:0=rows[1:8]", "y:0=rows")

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        x, y = x * 0 + 2**31 - 1, y * 0 - 128
        return [x + 1, x * 2, (x + 1).abs(), x.sum(), y - 1, y * 2, y.abs(), y.to(torch.uint8), x.to(torch.int8)]


class Shifts(nn.Module):
    """Bits of integers."""

    inputs = ("x=uint8[4,3]", "y=int32[4,3]")
    dynamic = ("x:0=rows[1:8]", "y:0=rows")

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        y = y - 1000
        return [some for z in (x, y) for some in (z << 3, z >> 2, z & 15, z | 1, z ^ 85, ~z)]


class NegativeUnsigned(nn.Module):
    """The negative of an unsigned integer, which ONNX does not have."""

    exit_code = 5
    says = "Neg of uint8"
    inputs = ("x=uint8[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return -x


class CountedBooleans(nn.Module):
    """Sums of booleans, which are integers."""

    inputs = ("mask=bool[4,3]",)
    dynamic = ("mask:0=rows[1:8]",)

    def forward(self, mask: Tensor) -> list[Tensor]:
        return [mask.cumsum(0), mask.sum(1), mask.any(1), mask.all(), mask.float().mean(0)]


class Powers(nn.Module):
    """Powers of and by Python numbers, at any size (pytorch#147606)."""

    inputs = ("x=float32[4,3]", "n=int64[4,3]")
    dynamic = ("x:0=rows[1:8]", "n:0=rows")

    def forward(self, x: Tensor, n: Tensor) -> list[Tensor]:
        return [2**x, 0.5 ** torch.arange(x.shape[0]), 2 ** (n % 10), (n % 100) ** 3]


class PowerOfSize(nn.Module):
    """A power by a size (pytorch#147606)."""

    exit_code = 5
    says = "torch.onnx fails at aten.pow.Tensor_Scalar"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x ** x.shape[0]


class BoundsOfOneTensor(nn.Module):
    """Different bounds of one tensor: onnxscript's optimiser gives all of them one name."""

    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x.clamp(-0.5, 0.5), x.clamp(0, 1), x.clamp(-0.5, 0.25), x.clamp(min=-0.1).clamp(max=0.1)]


class NanBounds(nn.Module):
    """NaN and infinities in bounds, extremes and sorts."""

    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = torch.where(x > 0.7, torch.nan, torch.where(x < -0.7, -torch.inf, x))
        extremes = [y.clamp(-1, 1), y.clamp(max=0), y.amax(1), y.min(0)[0], y.argmax(1), torch.maximum(y, x)]
        return [*extremes, y.topk(3)[0], y.sort(1)[0], y.sort(1, descending=True)[0], y.relu(), y.nan_to_num()]


class Complex(nn.Module):
    """Complex numbers inside of the model (pytorch#126972)."""

    inputs = ("x=float32[4,3,2]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.view_as_complex(x)
        turned = torch.view_as_real(torch.polar(x[..., 0].abs(), x[..., 1]))
        return torch.view_as_real(z * z.conj() + 1), z.abs(), turned


class ComplexExponential(nn.Module):
    """A function of complex numbers that torch.onnx does not know (pytorch#126972)."""

    exit_code = 5
    says = "torch.onnx does not translate aten.exp.default"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x).exp().imag


class ComplexResult(nn.Module):
    """A complex output (pytorch#126972)."""

    exit_code = 5
    says = "is complex64, which ONNX Runtime does not compute with"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


class Fourier(nn.Module):
    """The Fourier transform (pytorch#128324)."""

    inputs = ("x=float32[4,8]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.fft.rfft(x).abs(), torch.view_as_real(torch.fft.fft(x))


class SizeAsBase(nn.Module):
    """A power of a size (pytorch#147606)."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[3:8]",)  # torch 2.11 and 2.12 ask whether it is 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(x.shape[0], x)
