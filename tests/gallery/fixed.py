"""Modules whose control flow or sizes depend on what is fixed, or on tensors of sizes."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class PaddingFromBuffers(nn.Module):
    """How much to pad, from a buffer, as Encodec has it."""

    inputs = ("x=float32[2,1,100]",)
    dynamic = ("x:0=batch[1:4]", "x:2=length[20:400]")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.tensor(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        left = self.total - self.total // 2
        if left > 0:
            x = functional.pad(x, (int(left), int(self.total // 2)))
        return x.unfold(-1, 7, 2).sum(-1)


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


class KnownMask(nn.Module):
    """Columns that a buffer chooses and repeats."""

    inputs = ("x=float32[4,4]",)
    dynamic = ("x:0=batch[1:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.tensor([True, False, True, True]), persistent=False)
        self.register_buffer("times", torch.tensor([2, 1, 3]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, self.keep].reshape(-1, 3)
        return kept.repeat_interleave(self.times, dim=1).reshape(-1, 2, 3) + torch.unique(self.times)


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


class TensorOfSizes(nn.Module):
    """Levels of features, whose sizes go through a tensor, as deformable attention has them."""

    inputs = ("image=float32[2,3,16,24]",)
    dynamic = ("image:0=batch[1:4]", "image:2=4*h[1:8]", "image:3=4*w[1:8]")

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        levels = [functional.avg_pool2d(image, 2), functional.avg_pool2d(image, 4)]
        shapes = torch.as_tensor([level.shape[-2:] for level in levels], dtype=torch.long, device=image.device)
        start = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
        parts = torch.cat([level.flatten(2) for level in levels], 2).split(shapes.prod(1).tolist(), 2)
        x = torch.linspace(0.5, shapes[0, 1] - 0.5, levels[0].shape[-1])
        return parts[1].unflatten(2, shapes[1].tolist()) + len(image), start, x


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
