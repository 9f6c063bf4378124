"""The reference of the kernels in candidates.py."""

from __future__ import annotations

import torch


def doubled(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.dtype in (torch.float32, torch.float64), lambda: "x must be float32 or float64")
    return x * 2


def to_time():
    yield (torch.randn(300, 7),), {}


def ramp(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


def ramps_to_time():
    yield (300,), {}


def __getattr__(name: str):
    """`loading` is a reference whose module brings the operator that it is to judge."""
    if name != "loading":
        raise AttributeError(name)
    if not hasattr(torch.ops.candidates, "own"):
        library.define("own(Tensor x) -> Tensor")
    return doubled


library = torch.library.Library("candidates", "FRAGMENT")
