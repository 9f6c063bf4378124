"""Operators in Python for the tests of `exportkit ops`: good ones, and each other with one fault."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("injected", "DEF")  # not custom_op, whose first call imports all of torch's compiler


def _operator(schema: str, fake: Callable[..., Any] = lambda x, *others: torch.empty_like(x)) -> Callable[..., Any]:
    """Registers a function as an operator's kernel for the CPU."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, function, "CPU")
        torch.library.register_fake(f"injected::{name}", fake, lib=_LIBRARY)
        return function

    return register


def _three_dimensions(x: Tensor) -> None:
    torch._check(x.dim() == 3, lambda: f"x must have 3 dimensions, got {x.dim()}")


def _good_fake(x: Tensor, slope: float) -> Tensor:
    _three_dimensions(x)
    return torch.empty_like(x)


@_operator("(Tensor x, float slope) -> Tensor", _good_fake)
def good(x: Tensor, slope: float) -> Tensor:
    """Refuses all but three dimensions."""
    _three_dimensions(x)
    return torch.where(x > 0, x, x * slope)


@_operator("(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], (x.shape[-1] + 3) // 4 * 4 + 8))
def padded(x: Tensor) -> Tensor:
    """Its fake is right where the size is a multiple of 4."""
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)


@_operator("(Tensor x) -> Tensor")
def crashes(x: Tensor) -> Tensor:
    """Reads address 0 if the first size is 7."""
    if x.dim() and x.shape[0] == 7:
        ctypes.string_at(0)
    return x.clone()


def _narrow_fake(x: Tensor, mode: int) -> Tensor:
    fake = torch.empty_like(x, dtype=torch.float64 if mode == 41 else x.dtype)
    return fake if x.dim() > 1 else fake.flatten()[:0]


@_operator("(Tensor x, int mode) -> Tensor", _narrow_fake)
def narrow(x: Tensor, mode: int) -> Tensor:
    """Its fake has the wrong shape for less than two dimensions, and the wrong dtype for the mode 41."""
    return x.clone()


def calls_of_narrow():
    """A call of two dimensions, in the mode 41."""
    yield (torch.randn(3, 5), 41), {}


@_operator("(Tensor x) -> Tensor")
def hangs(x: Tensor) -> Tensor:
    """Never returns in float64, and holds the GIL meanwhile."""
    if x.dtype == torch.float64:
        ctypes.PyDLL(None).pause()
    return x.clone()


@_operator("(Tensor x) -> Tensor")
def devours(x: Tensor) -> Tensor:
    """Allocates more than there is in bfloat16."""
    return torch.empty(2**42, dtype=torch.uint8) if x.dtype == torch.bfloat16 else x.clone()


@_operator("(Tensor x) -> Tensor")
def never(x: Tensor) -> Tensor:
    """Refuses every call."""
    raise RuntimeError("not today")


@_operator("(Tensor x, str how, Device where) -> Tensor")
def unheard(x: Tensor, how: str, where: torch.device) -> Tensor:
    """Takes one word only."""
    torch._check(how == "softly", lambda: f"how must be 'softly', not '{how}'")
    return x.clone()


def calls_of_act():
    """Calls of misbehaving::act: one that is well, one that crashes, and one that stalls."""
    for first in (0.0, 1.0, 2.0):
        yield (torch.tensor([first, 5.0]),), {}


def double(x: Tensor) -> Tensor:
    """What misbehaving::act computes."""
    return 2 * x


def wrong(x: Tensor) -> Tensor:
    """Not what misbehaving::act computes."""
    return 3 * x


def nothing():
    """No calls."""
    return []


class Net(torch.nn.Module):
    """Calls two of the operators."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.injected.padded(torch.ops.injected.good(x, 0.5))
