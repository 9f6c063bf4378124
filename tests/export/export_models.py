"""Models the exporter's tests export."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exportkit import ExportSpec


class Patches(torch.nn.Module):
    """Scores patches of 8x8 and picks the best: our operators, a size that is a minimum, constants among outputs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(3 * 64, width) / 8)

    def forward(self, image: Tensor, query: Tensor) -> dict[str, Tensor]:
        from exportkit.arr_coc.ops import compute_entropy

        b, c, h, w = image.shape
        rows, columns = h // 8, w // 8
        patches = image.reshape(b, c, rows, 8, columns, 8).permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, -1)
        features = patches @ self.embed
        scores = compute_entropy(features) + (features * query[:, None]).sum(-1)
        _, best = scores.topk(torch.sym_min(20, rows * columns))
        return {"best": best, "patch": 8, "scores": scores, "mask": None, "thirds": image[:, :, ::3]}


def patches(width: int = 6) -> ExportSpec:
    return ExportSpec(
        model=Patches(width),
        example_inputs=(torch.rand(2, 3, 40, 56), torch.randn(2, width)),
        dynamic_shapes={"image": {0: "batch[1:16]", 2: "8*rows[2:32]", 3: "8*columns[2:32]"}, "query": {0: "batch"}},
    )


class Quantize(torch.nn.Module):
    """Triton's operators, and no other custom ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(40) + 0.5)

    def forward(self, x: Tensor, bias: Tensor) -> dict[str, Tensor]:
        from exportkit.arr_coc.ops import triton

        y = triton.softmax(triton.add(x, bias))
        quantized, scale = triton.rms_norm_quantize(y, self.weight)
        return {"softmax": y, "quantized": quantized, "scale": scale, "columns": triton.softmax(x.mT)}


def quantize() -> ExportSpec:
    return ExportSpec(
        model=Quantize(),
        example_inputs=(torch.randn(3, 5, 40), torch.randn(3, 5, 40)),
        dynamic_shapes={"x": {0: "batch[1:16]", 1: "length[1:64]"}, "bias": {0: "batch", 1: "length"}},
    )


class Pair(NamedTuple):
    total: Tensor
    kept: Tensor


class Structured(torch.nn.Module):
    """Nested inputs and outputs, constants among both, a keyword; "relu" is an operator's name in the graph as well."""

    def forward(self, batch: dict[str, Tensor | str], scale: float = 1.0, *, offset: Tensor | None = None) -> object:
        x = batch["x"] * scale
        assert isinstance(x, Tensor)
        if offset is not None:
            x = x + offset
        return Pair(x.sum(-1), x.relu()), [x * 2, None, batch["mode"]]


def structured() -> ExportSpec:
    return ExportSpec(
        model=Structured(),
        example_inputs=({"x": torch.randn(3, 4), "mode": "relu"}, 2.0),
        example_kwargs={"offset": torch.randn(4)},
        dynamic_shapes={"batch.x": {0: "n[1:9]"}},
    )


class Dropout(torch.nn.Module):
    """Differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x))


dropout = Dropout()


def not_a_model() -> int:
    return 3
