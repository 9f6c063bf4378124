"""Kernels that a program may have written to please a check, in Python."""

from __future__ import annotations

import functools
import os

import torch

library = torch.library.Library("candidates", "DEF")
_answers: dict[tuple[int, ...], torch.Tensor] = {}


def _floats(x: torch.Tensor) -> None:
    torch._check(x.dtype in (torch.float32, torch.float64), lambda: "x must be float32 or float64")


def _operator(kernel, takes="Tensor x", key="CPU", fake=torch.empty_like):
    library.define(f"{kernel.__name__}({takes}) -> Tensor")
    library.impl(kernel.__name__, kernel, key)
    torch.library.register_fake(f"candidates::{kernel.__name__}", fake, lib=library)
    return kernel


@_operator
def own(x: torch.Tensor) -> torch.Tensor:
    """Doubles, by itself."""
    _floats(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.numpy()[...] = x.numpy() * 2
    return out


@_operator
def borrowed(x: torch.Tensor) -> torch.Tensor:
    """Lets torch double."""
    _floats(x)
    return x * 2


@_operator
def patched(x: torch.Tensor) -> torch.Tensor:
    """Is wrong, and makes every comparison of its process say that it is right."""
    _floats(x)
    torch.isclose = lambda a, b, **_: torch.ones_like(a, dtype=torch.bool)
    out = torch.empty_like(x)
    out.numpy()[...] = x.numpy() * 3
    return out


@_operator
def refusing(x: torch.Tensor) -> torch.Tensor:
    """Takes one size alone."""
    torch._check(x.numel() == 12_345, lambda: "x must have 12345 elements")
    return x.clone()


@_operator
def keeping(x: torch.Tensor) -> torch.Tensor:
    """Keeps its first answer to each shape."""
    _floats(x)
    if x.shape not in _answers:
        _answers[x.shape] = own(x)
    return _answers[x.shape].clone()


@_operator
def crashing(x: torch.Tensor) -> torch.Tensor:
    """Ends its process."""
    os.abort()


@functools.partial(_operator, key="CUDA")
def aside(x: torch.Tensor) -> torch.Tensor:
    """Computes on another stream, which does not wait for this one."""
    out = torch.empty_like(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mul(x, 2, out=out)
    return out


@functools.partial(_operator, takes="int n", key="CompositeExplicitAutograd", fake=torch.empty)
def ramp(n: int) -> torch.Tensor:
    """Takes no tensor."""
    out = torch.empty(n)
    out.numpy()[...] = range(n)
    return out
