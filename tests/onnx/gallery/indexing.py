"""Modules that write or read at positions: scatters, masks, rolls, copies into slices."""

import torch
from torch import Tensor, nn


def _pairs(x: Tensor) -> Tensor:
    """Positions for `scatter` along the rows of x, each taken twice."""
    return (torch.arange(x.shape[0]) // 2)[:, None].expand(-1, x.shape[1])


class MaskedScatter(nn.Module):
    """Elements replaced by a mask, from a source of the same size (pytorch#186146)."""

    inputs = ("x=float32[4,3]", "mask=bool[4,3]", "source=float32[4,3]")
    dynamic = ("x:0=rows[1:8]", "mask:0=rows", "source:0=rows")

    def forward(self, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return x.masked_scatter(mask, source)


class MaskedAssignment(nn.Module):
    """x[mask] = 0, and rows chosen by a mask (pytorch#126856)."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        elements, rows = x.clone(), x.clone()
        elements[x < 0] = 0
        rows[x[:, 0] < 0] = 1
        return elements, rows


class MaskedValues(nn.Module):
    """x[mask] = values, as many as the mask has (pytorch#126856)."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[x < 0] = x[x < 0] * 2
        return y


class ScatterReduce(nn.Module):
    """The sum, product and extremes of what is scattered, whose sizes must not be constants (onnxruntime#17653)."""

    inputs = ("x=float32[4,3]", "y=float32[4,3]")
    dynamic = ("x:0=rows[1:8]", "y:0=rows")

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        index = _pairs(x)
        return [
            x.scatter_reduce(0, index, y, kind, include_self=include_self)
            for kind in ("sum", "prod", "amax", "amin")
            for include_self in (True, False)
        ]


class ScatterInfinity(nn.Module):
    """The extremes of infinities and NaN, without what was there before (onnxruntime#17653)."""

    inputs = ("x=float32[4,3]", "y=float32[4,3]")
    dynamic = ("x:0=rows[1:8]", "y:0=rows")

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        low, high = torch.full_like(y, -torch.inf), torch.full_like(y, torch.inf)
        nan = torch.where(y > 0.5, torch.nan, y)
        return [
            x.scatter_reduce(0, _pairs(x), some, kind, include_self=False)
            for kind in ("amax", "amin")
            for some in (low, high, nan)
        ]


class HalfScatterAdd(nn.Module):
    """A sum of scattered float16, for which ONNX Runtime has no CPU kernel (onnxruntime#17653)."""

    inputs = ("x=float16[4,3]", "y=float16[4,3]")
    dynamic = ("x:0=rows[1:8]", "y:0=rows")

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.scatter_add(0, _pairs(x), y), x.index_add(0, _pairs(x)[:, 0], y)


class IndexPutAccumulate(nn.Module):
    """Positions that come twice, counted from the end, whose values are added."""

    inputs = ("x=float32[4,3]", "y=float32[6]")
    dynamic = ("y:0=rows[1:8]",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        index = -1 - torch.arange(y.shape[0]) // 2 % 3
        return x.index_put((index, index), y, accumulate=True)


class Rolled(nn.Module):
    """Elements moved round, also further than there are (pytorch#128324)."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.roll(1, 0), x.roll((-1, 2), (0, 1)), x.roll(2), x.roll(5, 0)


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


class RepeatedBySize(nn.Module):
    """Rows repeated as often as a tensor says, or a size."""

    inputs = ("x=float32[4,3]", "times=int64[4]")
    dynamic = ("x:0=rows[1:8]", "times:0=rows")

    def forward(self, x: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        by_size = x.repeat_interleave(x.shape[0], 1), x.repeat(x.shape[0], 1), x.repeat_interleave(2, 0)
        return x.repeat_interleave(times % 3, 0), *by_size
