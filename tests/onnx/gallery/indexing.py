"""Modules that write or read at positions: masks, copies into slices, positions from the end."""

import torch
from torch import Tensor, nn


class MaskedValues(nn.Module):
    """x[mask] = values, as many as the mask has (pytorch#126856)."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[x < 0] = x[x < 0] * 2
        return y


class IndexPutAccumulate(nn.Module):
    """Positions that come twice, counted from the end, whose values are added."""

    inputs = ("x=float32[4,3]", "y=float32[6]")
    dynamic = ("y:0=rows[1:8]",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        index = -1 - torch.arange(y.shape[0]) // 2 % 3
        return x.index_put((index, index), y, accumulate=True)


class CopiedIntoSlice(nn.Module):
    """A copy into a part of a tensor (pytorch#128324)."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 1:].copy_(x[:, :-1])
        y[-1] += 3
        return y


class EmbeddingOfPadding(nn.Module):
    """Tables with a row for padding, counted from the end."""

    inputs = ("ids=int64[4,3]",)
    dynamic = ("ids:0=rows[1:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(5, 3, padding_idx=-1), nn.EmbeddingBag(5, 3, mode="mean", padding_idx=-2)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids % 5), self.bag(ids % 5)
