"""A tensor that takes what another one was gets just that: torch's own code gives it what the other has become."""

from __future__ import annotations

import torch
from torch import Tensor

from exportkit.export.compile.inductor_changes import changed_inductor


def writes(new: Tensor, old: Tensor, one: Tensor, other: Tensor, long: Tensor, part: Tensor, x: Tensor) -> None:
    """One tensor takes another one's value; two change places; one takes a part."""
    before = new.clone(), one.clone(), other.clone(), long[2:5].clone()
    for to, value in zip((old, other, one, part), before, strict=True):
        to.copy_(value)
    new.copy_(new * 0.5 + x.sum(0))
    long.mul_(2)


def test_values_are_those_from_before_all_writes() -> None:
    found = [torch.rand(length) for length in (3, 3, 4, 4, 6, 3)]
    wanted, x = [tensor.clone() for tensor in found], torch.rand(5, 3)
    with torch.no_grad(), changed_inductor():
        torch.compile(writes, options={"fx_graph_cache": False})(*[*found, x])
        writes(*[*wanted, x])
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager)
