"""Operators in Python for the tests of `exportkit ops`: good ones, and each with one fault."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


@torch.library.custom_op("planted::good", mutates_args=())
def good(x: Tensor, slope: float) -> Tensor:
    """Refuses all but three dimensions."""
    torch._check(x.dim() == 3, lambda: f"x must have 3 dimensions, got {x.dim()}")
    return torch.where(x > 0, x, x * slope)


@good.register_fake
def _(x: Tensor, slope: float) -> Tensor:
    torch._check(x.dim() == 3, lambda: f"x must have 3 dimensions, got {x.dim()}")
    return torch.empty_like(x)


@torch.library.custom_op("planted::padded", mutates_args=())
def padded(x: Tensor) -> Tensor:
    """Its fake is right where the size is a multiple of 4."""
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)


@padded.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], (x.shape[-1] + 3) // 4 * 4 + 8)


@torch.library.custom_op("planted::crashes", mutates_args=())
def crashes(x: Tensor) -> Tensor:
    """Reads address 0 if the first size is 7."""
    if x.dim() and x.shape[0] == 7:
        ctypes.string_at(0)
    return x.clone()


@torch.library.custom_op("planted::hangs", mutates_args=())
def hangs(x: Tensor) -> Tensor:
    """Never returns in float64, and holds the GIL meanwhile."""
    if x.dtype == torch.float64:
        ctypes.PyDLL(None).pause()
    return x.clone()


@torch.library.custom_op("planted::devours", mutates_args=())
def devours(x: Tensor) -> Tensor:
    """Allocates more than there is in bfloat16."""
    return torch.empty(2**42, dtype=torch.uint8) if x.dtype == torch.bfloat16 else x.clone()


@torch.library.custom_op("planted::never", mutates_args=())
def never(x: Tensor) -> Tensor:
    """Refuses every call."""
    raise RuntimeError("not today")


@torch.library.custom_op("planted::unheard", mutates_args=())
def unheard(x: Tensor, how: str, where: torch.device) -> Tensor:
    """Takes one word only."""
    torch._check(how == "softly", lambda: f"how must be 'softly', not '{how}'")
    return x.clone()


for operator in (crashes, hangs, devours, never):
    operator.register_fake(lambda x: torch.empty_like(x))
unheard.register_fake(lambda x, how, where: torch.empty_like(x))


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
        return torch.ops.planted.padded(torch.ops.planted.good(x, 0.5))
