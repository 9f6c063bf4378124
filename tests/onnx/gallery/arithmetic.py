"""Modules that compute with numbers at their limits: signs, powers, complex numbers."""

import torch
from torch import Tensor, nn


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


class Complex(nn.Module):
    """Complex numbers inside of the model (pytorch#126972)."""

    inputs = ("x=float32[4,3,2]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = torch.view_as_complex(x)
        turned = torch.view_as_real(torch.polar(x[..., 0].abs(), x[..., 1]))
        return torch.view_as_real(z * z.conj() + 1), z.abs(), turned


class Fourier(nn.Module):
    """The Fourier transform (pytorch#128324)."""

    inputs = ("x=float32[4,8]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.fft.rfft(x).abs(), torch.view_as_real(torch.fft.fft(x))
