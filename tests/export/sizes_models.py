"""Modules whose conditions on sizes hold by construction, and some whose do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from exportkit import ExportSpec

ROWS = {"x": {0: "batch[1:8]", 1: "n[2:100]"}}


class Step(torch.nn.Module):
    """One token at a time, with a cache that grows, and grouped keys that are repeated for the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(64, n) for n in (64, 32, 32))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        r = [t[:, :, None].expand(b, 4, 2, t.shape[2], 8).reshape(b, 8, t.shape[2], 8) for t in (k, v)]
        return F.scaled_dot_product_attention(q, *r).transpose(1, 2).reshape(b, n, 64), (k, v)


def step() -> ExportSpec:
    size = {0: "batch[1:8]", 2: "length[1:100]"}
    past = (torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8))
    return ExportSpec(
        model=Step(),
        example_inputs=(torch.randn(2, 1, 64), past),
        dynamic_shapes={"x": {0: "batch[1:8]"}, "past.0": size, "past.1": size},
    )


def _halves(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return torch.cat([x[:, half:], x[:, :half]], 1)


def _interleaved(x: Tensor) -> Tensor:
    return torch.cat([x[:, ::2], x[:, 1::2]], 1) + x


def _in_eights(x: Tensor) -> Tensor:
    rows = F.pad(x, (0, 0, 0, -x.shape[1] % 8)).view(x.shape[0], -1, 8, 8)
    return rows.cumsum(2).view(x.shape[0], -1, 8)[:, : x.shape[1]] + x


def _repeated(x: Tensor) -> Tensor:
    b, n, d = x.shape
    return x[:, None].expand(b, 3, n, d).reshape(3 * b, n, d).view(b, 3, n, d).sum(1)


def _skewed(x: Tensor) -> Tensor:
    b, n, _ = x.shape
    scores = F.pad(x @ x.transpose(1, 2), (1, 0)).view(b, n + 1, n)[:, 1:].reshape(b, n, n)
    return scores.softmax(-1) @ x


def _grouped(x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k = x.view(b, n, 4, 2).transpose(1, 2), x.view(b, n, 4, 2)[:, :, ::2].transpose(1, 2)
    k = k.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(b, n, 8)


def _shifted(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1], x], 1)[:, 1:] + torch.cat([x, x[:, :1]], 1)[:, : x.shape[1]]


def _positions(x: Tensor) -> Tensor:
    return x + torch.arange(128)[: x.shape[1], None]


def _turned(x: Tensor) -> Tensor:
    b, n, d = x.shape
    return x.permute(1, 0, 2).reshape(-1, d).view(n, b, d).permute(1, 0, 2)


def _branched(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] <= 128 and min(x.shape[1], 400) == x.shape[1] and (x.shape[1] + 7) // 8 <= 13 else x


def _doubled(x: Tensor) -> Tensor:
    both = torch.stack([x, x + 1], 2).flatten(1, 2)
    return both.chunk(2, 1)[0] + both[:, ::2]


def _changes(x: Tensor) -> Tensor:
    changed = torch.cat([torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != x[:, :-1]], 1)
    return torch.where(changed, x, 0)


BLOCKS: Sequence[Callable[[Tensor], Tensor]] = (
    _halves,
    _interleaved,
    _in_eights,
    _repeated,
    _skewed,
    _grouped,
    _shifted,
    _positions,
    _turned,
    _branched,
    _doubled,
    _changes,
)
"""Functions of [batch, n, 8] to the same sizes, right for every batch and every n from 2 to 100."""


class Chain(torch.nn.Module):
    """Blocks, one after the other."""

    def __init__(self, *blocks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self._blocks:
            x = block(x)
        return x


def chain(*blocks: Callable[[Tensor], Tensor], n: int = 7) -> ExportSpec:
    return ExportSpec(model=Chain(*blocks), example_inputs=(torch.randn(2, n, 8),), dynamic_shapes=ROWS)


def squeezed(x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2].squeeze(1)


def asks_half(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] // 2 == 1 else x


def small_batch_of_halves(x: Tensor) -> Tensor:
    return _halves(x) if x.shape[0] < 5 else x


def small_half(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] // 2 <= 20 else x


def few_rows(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] * x.shape[1] <= 100 else x


def legal_rows(x: Tensor) -> Tensor:
    torch._check(x.shape[0] * x.shape[1] <= 100)
    return x * 2
