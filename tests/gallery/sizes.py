"""Modules whose sizes make trouble."""

import torch
from torch import Tensor, nn
from torch.export import Dim

from exportkit.spec import ExportSpec


class ViewOfTheExample(nn.Module):
    """A view with the example's batch written into it (pytorch#133653)."""

    says = "Write --dynamic x:0=4 (x:0 is always 4)"
    inputs = ("x=float32[4,6]",)
    dynamic = ("x:0=batch[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, 2, 3) + 1


class ExampleOfOne(nn.Module):
    """A dynamic size whose example is 1 (TICO#248)."""

    exit_code = 2
    says = "torch.export treats sizes 0 and 1 as constants"
    inputs = ("x=float32[1,6]",)
    dynamic = ("x:0=batch[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, 3)


class ExampleAtTheEnd(nn.Module):
    """An example at the lower end of its range (pytorch#176349)."""

    inputs = ("x=float32[2,6]",)
    dynamic = ("x:0=batch[2:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, 3).softmax(-1)


class Patches(nn.Module):
    """A size that must be a multiple (pytorch#140011)."""

    says = "Write --dynamic 'image:1=16*h[2:8]'"
    inputs = ("image=float32[2,64,8]",)
    dynamic = ("image:0=batch[1:8]", "image:1=h[32:128]")

    def forward(self, image: Tensor) -> Tensor:
        b, h, _ = image.shape
        return image.reshape(b, h // 16, 16, 8).sum(2)


class Downsampled(nn.Module):
    """Two halvings and the way back, which only multiples of 4 survive (pytorch#115492)."""

    says = "Write --dynamic 'x:2=4*time[2:16]'"
    inputs = ("x=float32[2,1,32]",)
    dynamic = ("x:2=time[8:64]",)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(1, 1, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose1d(1, 1, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.up(self.down(self.down(x))))


class OffByOne(nn.Module):
    """A slice whose result may be of one row (pytorch#126127)."""

    inputs = ("x=float32[5,3]",)
    dynamic = ("x:0=n[2:9]",)

    def forward(self, x: Tensor) -> Tensor:
        return x[1:].contiguous() * 2


class Positions(nn.Module):
    """A table of positions shorter than the range of the length (pytorch#140011)."""

    says = "Write --dynamic 'ids:1=length[2:128]'"
    inputs = ("ids=int64[2,16]",)
    dynamic = ("ids:1=length[2:200]",)
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(128, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[: ids.shape[1]] + ids[..., None]


class SizeRemembered(nn.Module):
    """The first call's size, kept by Python code (ao#3824)."""

    says = "tracing made a constant of something that depends on a size"
    dynamic = ("x:0=batch[2:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.rows: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is None or torch.compiler.is_exporting() is False:
            self.rows = x.shape[0]
        return x.sum(0) / self.rows


class RememberedRows(nn.Module):
    """A table of the greatest size so far, kept for later calls."""

    dynamic = ("x:0=batch[2:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or (self.table.shape[0] < x.shape[0]):
            self.table = torch.arange(x.shape[0])[:, None].float()
        return x + self.table[: x.shape[0]]


class AdaptivePool(nn.Module):
    """Adaptive pooling of images of any size."""

    inputs = ("image=float32[2,3,32,24]",)
    dynamic = ("image:2=h[14:64]", "image:3=w[14:64]")

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d((12, 9))  # windows that Inductor writes itself

    def forward(self, image: Tensor) -> Tensor:
        return self.pool(image)


class GroupedKeys(nn.Module):
    """A step of one token with grouped keys, a growing cache, and a mask from sizes."""

    onnx = ""
    inputs = ("x=float32[2,1,64]", "keys=float32[2,2,7,16]", "values=float32[2,2,7,16]")
    dynamic = (
        "x:0=batch[1:8]",
        "keys:0=batch[1:8]",
        "values:0=batch[1:8]",
        "keys:2=length[1:256]",
        "values:2=length[1:256]",
    )

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.pairs = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, _ = x.shape
        q = self.queries(x).view(b, t, 4, 16).transpose(1, 2)
        k, v = self.pairs(x).view(b, t, 2, 2, 16).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        length = keys.shape[2]
        spread = keys[:, :, None].expand(b, 2, 2, length, 16).reshape(b, 4, length, 16)
        mask = torch.ones(t, length, dtype=torch.bool).tril(length - t)
        y = nn.functional.scaled_dot_product_attention(q, spread, values.repeat_interleave(2, 1), attn_mask=mask)
        return y.transpose(1, 2).reshape(b, t, -1), keys, values


class TorchSizes(nn.Module):
    """torch.export's own form of sizes, at nested places."""

    onnx = ""

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        return x @ past[0][0].mT, [torch.cat([keys, x], -2) @ values.mT for keys, values in past]

    @classmethod
    def make(cls) -> ExportSpec:
        batch, length = Dim("batch", min=1, max=8), Dim("length", min=1, max=100)
        example = (torch.rand(2, 1, 4), [(torch.rand(2, 7, 4), torch.rand(2, 9, 4))])
        sizes = {"x": {0: batch}, "past": [({0: batch, 1: length}, {0: batch, 1: Dim.AUTO})]}
        return ExportSpec(cls(), example, dynamic_shapes=sizes)


class GruWithLengths(nn.Module):
    """A GRU of two layers, and each row's last step (pytorch#126339)."""

    onnx = ""
    inputs = ("features=float32[2,11,6]", "lengths=int64[2]")
    dynamic = ("features:0=batch[1:8]", "features:1=time[2:40]", "lengths:0=batch")

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 4, 2, batch_first=True)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden, last = self.gru(features)
        at = lengths.remainder(features.shape[1])[:, None, None].expand(-1, 1, 4)
        return hidden.gather(1, at).squeeze(1), last
