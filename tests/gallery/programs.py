"""Modules that do what a traced program cannot: NumPy, state, randomness, Python's own means."""

import sys
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from exportkit.spec import ExportSpec


class SpectrumOfAnyLength(nn.Module):
    """A complex spectrum divided by its length (pytorch#113444)."""

    inputs = ("signal=float32[3,16]", "kernel=float32[3,6]")
    dynamic = ("signal:1=length[8:64]",)

    def forward(self, signal: Tensor, kernel: Tensor) -> Tensor:
        n = 2 * signal.shape[1]
        spectrum = torch.fft.rfft(kernel, n=n) / n
        return torch.fft.irfft(torch.fft.rfft(signal, n=n) * spectrum, n=n, norm="forward")[:, : signal.shape[1]]


class Numpy(nn.Module):
    """NumPy in the middle of the model."""

    says = "the model calls NumPy at programs.py"

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sqrt(x.numpy()))


class Prints(nn.Module):
    """A print that was left behind."""

    def forward(self, x: Tensor) -> Tensor:
        print("hello from forward")
        return x + 1


class Raises(nn.Module):
    """A check of the model's own that the example does not pass."""

    says = "ValueError: the width must be even"

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            raise ValueError("the width must be even")
        return x


class Exits(nn.Module):
    """A forward that ends the process."""

    says = "SystemExit: no licence"

    def forward(self, x: Tensor) -> Tensor:
        sys.exit("no licence")


class Counter(nn.Module):
    """A buffer that counts the calls."""

    says = "the model changes its buffers calls"
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class PythonCounter(nn.Module):
    """A Python number that counts the calls."""

    says = "is given the number 2 and then 3"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class WritesInput(nn.Module):
    """A forward that writes into its input."""

    says = "the model writes into its inputs x"

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


class Noise(nn.Module):
    """Random noise."""

    says = "draws random numbers"

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Vmapped(nn.Module):
    """torch.vmap within the model (kserve#4568)."""

    since = "2.13"
    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * row.sum())(x)


class Compiled(nn.Module):
    """A part that torch.compile wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class DynamicallyQuantized(nn.Module):
    """A layer of torch.ao's dynamic quantization."""

    says = "packed object of torch.ao's quantization"

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class SparseInside(nn.Module):
    """A sparse tensor within the model (pytorch#169488)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x.relu().to_sparse(), x.T)


class Cached(nn.Module):
    """A function that remembers its answers."""

    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x + _ramp(x.shape[1])


@lru_cache
def _ramp(size: int) -> Tensor:
    return torch.arange(size).float()


class QuantizedLinear(nn.Module):
    """int8 weights that are made floats again (ao#4566)."""

    onnx = ""
    inputs = ("x=float32[8,16]",)
    dynamic = ("x:0=batch[1:64]",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (4, 16), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.clamp(torch.round(x / 0.05) + 128, 0, 255).to(torch.uint8)
        return nn.functional.linear((steps.float() - 128) * 0.05, self.weight.float() * self.scale)


class StreamingConvolution(nn.Module):
    """A convolution that keeps the end of the last chunk as state (executorch#5068)."""

    onnx = ""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 5, dilation=2)
        self.register_buffer("tail", torch.zeros(1, 2, 8))

    def forward(self, chunk: Tensor) -> Tensor:
        joined = torch.cat([self.tail, chunk], -1)
        self.tail.copy_(joined[..., -8:])
        return self.conv(joined)

    @classmethod
    def make(cls) -> ExportSpec:
        sizes = {"chunk": {2: "samples[9:400]"}}
        return ExportSpec(cls(), (torch.rand(1, 2, 40),), dynamic_shapes=sizes, state=("tail",))


class CacheInPlace(nn.Module):
    """A cache of keys that is written in place."""

    onnx = ""

    def forward(self, x: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        return x @ cache.index_copy_(1, at.remainder(cache.shape[1]), x).mT

    @classmethod
    def make(cls) -> ExportSpec:
        sizes = {"x": {0: "batch[1:8]"}, "cache": {0: "batch"}}
        example = (torch.rand(2, 1, 4), torch.tensor([3]), torch.rand(2, 16, 4))
        return ExportSpec(cls(), example, dynamic_shapes=sizes, writes=("cache",))
