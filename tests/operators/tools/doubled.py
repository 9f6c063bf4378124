"""The reference of the kernels in candidates.py."""

from __future__ import annotations

import os

import torch


def doubled(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.dtype in (torch.float32, torch.float64), lambda: "x must be float32 or float64")
    return x * 2


def to_time():
    yield (torch.randn(300, 7),), {}


def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def raising(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not today")


def ending(x: torch.Tensor) -> torch.Tensor:
    os.abort()


def eager_only(x: torch.Tensor) -> torch.Tensor:
    return x @ x if torch.compiler.is_compiling() else x * 2


def words():
    yield ("a",), {}


def keywords():
    yield (torch.randn(300, 7),), {"by": 2}


def sets():
    yield ({1},), {}


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
