"""Modules whose control flow or sizes depend on what is fixed, or on tensors of sizes."""

import torch
from torch import Tensor, nn


class GridInBuffer(nn.Module):
    """Positions and parts by a grid of images, as Qwen-VL has them, that a fine-tune may replace."""

    inputs = ("x=float32[2,40,3]",)
    dynamic = ("x:0=batch[1:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.tensor([[1, 4, 6], [2, 2, 4]]))

    def forward(self, x: Tensor) -> Tensor:
        rows = [
            torch.arange(h)[:, None].expand(-1, w).reshape(h // 2, 2, w // 2, 2).transpose(1, 2).flatten().repeat(t)
            for t, h, w in self.grid.tolist()
        ]
        table = torch.arange(self.grid[:, 1:].max()).float().outer(torch.ones(3))
        lengths = torch.repeat_interleave(self.grid[:, 1] * self.grid[:, 2], self.grid[:, 0])
        parts = (x + table[torch.cat(rows)]).split(lengths.tolist(), 1)
        return torch.stack([part.mean(1) for part in parts], 1)


class BranchOnWeight(nn.Module):
    """A branch on the norm of a weight, and a loop as often as a buffer says."""

    inputs = ("x=float32[4,2]",)
    dynamic = ("x:0=batch[1:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("times", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.norm() > 1:
            x = x * self.weight
        for _ in range(int(self.times)):
            x = x + self.weight[0].item()
        return x


class BranchOnState(nn.Module):
    """A branch on a buffer that each call writes."""

    says = "the model changes its buffers calls while it runs"
    inputs = ("x=float32[4,2]",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1 if self.calls > 4 else x


class WrittenConstant(nn.Module):
    """Numbers that are written into a new tensor, and read."""

    inputs = ("x=float32[4,2]",)
    dynamic = ("x:0=batch[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.zeros(2, dtype=torch.long)
        sizes[0] = 3
        for row in sizes.view(2, 1).unbind():
            row += 1
        return x.repeat(1, int(sizes[0])) if torch.equal(sizes, torch.tensor([4, 1])) else x


class PlainAttributes(nn.Module):
    """Sizes and a switch in tensors that are no buffers."""

    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=batch[1:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.shape = torch.tensor([2, 3])
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale > 0.25:
            x = x * self.scale
        return x.unflatten(1, self.shape.tolist())


class SizesWrittenIntoTensor(nn.Module):
    """Sizes that are written into a tensor one after the other, as RT-DETR has them."""

    inputs = ("image=float32[2,3,16,24]",)
    dynamic = ("image:0=batch[1:4]", "image:2=h[4:80]", "image:3=w[4:80]")

    def forward(self, image: Tensor) -> Tensor:
        shapes = torch.empty((2, 2), dtype=torch.long)
        for level in range(2):
            shapes[level, 0] = image.shape[-2] // (level + 1)
            shapes[level, 1] = image.shape[-1] // (level + 1)
        height, width = shapes.flip(0)[0].tolist()
        longest = shapes.max().item()
        return image[:, :, :height, :width].flatten(2).sum(2, keepdim=True) + image.new_ones(longest)
