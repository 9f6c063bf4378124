"""Modules whose inputs, outputs or weights are of unusual kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit import ExportSpec


class NumberedDict(nn.Module):
    """A dict with numbers for keys."""

    exit_code = 2
    says = "a dict with the key 0; keys must be strings"

    def forward(self, x: Tensor) -> dict[int, Tensor]:
        return {0: x, 1: x + 1}


class NothingReturned(nn.Module):
    """No tensor as an output."""

    says = "the model returns no tensor"

    def forward(self, x: Tensor) -> None:
        x.sum()


class Complex(nn.Module):
    """Complex numbers within the model and as an output."""

    inputs = ("x=float32[4,8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


class Variadic(nn.Module):
    """Inputs in `*args` and `**kwargs`, each with a name of its own."""

    inputs = ("xs_0=float32[4,3]", "xs_1=float32[4,3]", "scale=float32[3]")
    dynamic = ("xs_0:0=n[1:64]", "xs_1:0=n")

    def forward(self, *xs: Tensor, **others: Tensor) -> Tensor:
        return torch.stack(xs).sum(0) * others["scale"]


class NoInputs(nn.Module):
    """A forward without inputs."""

    exit_code = 2
    says = "the example inputs contain no tensor"
    inputs = ()

    def forward(self) -> Tensor:
        return torch.ones(3)


class Quantized(nn.Module):
    """A quantized tensor as an output."""

    exit_code = 2
    says = "output 0 is quantized"

    def forward(self, x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


class SparseInput(nn.Module):
    """A sparse tensor as an input (pytorch#169488)."""

    exit_code = 2
    says = "input x is sparse"

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, torch.ones(3, 2))

    @classmethod
    def make(cls) -> ExportSpec:
        return ExportSpec(model=cls(), example_inputs=(torch.eye(3).to_sparse(),))


class SparseBuffer(nn.Module):
    """A sparse tensor as a buffer."""

    exit_code = 2
    says = "buffer weight is sparse"
    inputs = ("x=float32[3,3]",)
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x)


class Unmade(nn.Module):
    """Weights on the meta device."""

    exit_code = 2
    says = "parameter part.weight is on the meta device"

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Ünïcode(nn.Module):
    """A class whose name is not ASCII."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Channels(nn.Module):
    """An output whose layout is channels last."""

    inputs = ("image=float32[2,3,8,8]",)
    dynamic = ("image:0=batch[1:4]",)

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, image: Tensor) -> Tensor:
        return self.part(image.contiguous(memory_format=torch.channels_last))
