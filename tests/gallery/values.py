"""Modules whose control flow or sizes depend on the values of tensors."""

import torch
from torch import Tensor, nn


class BranchOnValue(nn.Module):
    """A branch on a value (pytorch#145443)."""

    says = "the model branches on the value of a tensor at values.py"

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class ItemScale(nn.Module):
    """A factor that was read from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class ItemSize(nn.Module):
    """A size that was read from a tensor."""

    says = "Leave int(), float() or range() out there"
    inputs = ("x=float32[4,3]", "n=int64[]")

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x.new_zeros(int(n.item())).sum() + x


class ListLoop(nn.Module):
    """A loop over a tensor's values."""

    inputs = ("x=float32[4,3]", "order=int64[2]")

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        return torch.stack([x[row] for row in order.tolist()])


class SplitByValues(nn.Module):
    """A split whose sizes were read from a tensor."""

    inputs = ("x=float32[2,3]", "lengths=int64[2]")

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        first, second = x.split((lengths * 0 + 1).tolist())
        return first - second


class MaskedScatter(nn.Module):
    """Elements replaced by a mask (pytorch#186146)."""

    inputs = ("x=float32[4,3]", "y=float32[12]")
    dynamic = ("x:0=n[2:4]",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.masked_scatter(x > 0.5, y)


class Unique(nn.Module):
    """Values without repetition."""

    onnx = ""
    inputs = ("ids=int64[8]",)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.unique(ids).sum() + ids


class Repeated(nn.Module):
    """Rows repeated as often as a tensor says."""

    inputs = ("x=float32[4,3]", "times=int64[4]")

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return x.repeat_interleave(times + 1, dim=0).sum(0)


class Checked(nn.Module):
    """A size that was read from a tensor, without int() and with its range."""

    inputs = ("x=float32[4,3]", "n=int64[]")

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        rows = n.item()
        torch._check(rows >= 0)
        torch._check(rows <= 4)
        return torch.narrow(x, 0, 0, rows).sum(0)


class ImagesOfManySizes(nn.Module):
    """Rows split by sizes of images, whose means replace tokens."""

    onnx = ""
    inputs = ("ids=int64[1,6]", "rows=float32[12,8]")
    dynamic = ("rows:0=rows[4:64]",)

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        first = ids[0, 0] * 0 + 2  # as a processor of images would give it
        counts = torch.stack([first, rows.shape[0] - first]).tolist()
        for count in counts:
            torch._check(count >= 1)
        means = torch.stack([part.mean(0) for part in torch.split(rows, counts)])
        image = (torch.arange(6) % 3 == 1)[None, :, None].expand(1, 6, 8)
        return ids[..., None].float().expand(1, 6, 8).masked_scatter(image, means)


class IntegerExtremes(nn.Module):
    """Extremes of integers of one sign (pytorch#191499)."""

    onnx = ""
    inputs = ("pixels=uint8[3,33]", "levels=int8[3,33]")
    dynamic = ("pixels:1=width[2:300]", "levels:1=width")

    def forward(self, pixels: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return pixels.amin(1), levels.amax(1), levels.argmax(1)


class WrappingIntegers(nn.Module):
    """Integers that wrap, and positions that do, as hashes of ids (pytorch#190764)."""

    onnx = ""
    inputs = ("ids=int32[11]",)
    dynamic = ("ids:0=n[2:300]",)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = ids * 1000003 + 12345
        mixed = (mixed ^ (mixed >> 13)) * 1540483477
        steps = torch.arange(0, ids.shape[0], dtype=torch.int32) * 1000000000
        return (mixed + mixed).to(torch.int64), steps.to(torch.int64) + ids, mixed % 97


class TiesInBfloat16(nn.Module):
    """The greatest after a division, counted in bfloat16 (pytorch#195214)."""

    onnx = "ONNX Runtime has no CPU kernel for Div of bfloat16"
    inputs = ("scores=bfloat16[4,64]",)
    dynamic = ("scores:0=batch[1:64]", "scores:1=length[2:512]")

    def forward(self, scores: Tensor) -> Tensor:
        scaled = scores / 11.3137085
        ties = (scaled == scaled.amax(-1, keepdim=True)).to(scores.dtype)
        return ties / ties.sum(-1, keepdim=True)
