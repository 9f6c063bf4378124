"""Models with recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from exportkit import ExportSpec

FEATURES, SIZE = 6, 5


@dataclass(frozen=True)
class Options:
    """What a layer is: `kind` is that of nn.RNN's nonlinearity, or "lstm" or "gru"."""

    kind: str = "lstm"
    layers: int = 1
    bidirectional: bool = False
    bias: bool = True
    batch_first: bool = False
    projection: int = 0
    states: bool = False  # whether the call gives them
    batched: bool = True
    dtype: torch.dtype = torch.float32
    frozen: bool = False  # whether its weights require no gradients

    def layer(self) -> nn.RNNBase:
        """The layer, in eval mode, with dropout between its layers, which then does nothing."""
        options: dict[str, Any] = {
            "num_layers": self.layers,
            "bias": self.bias,
            "batch_first": self.batch_first,
            "bidirectional": self.bidirectional,
            "dropout": 0.5 if self.layers > 1 else 0.0,
        }
        torch.manual_seed(self.layers)
        if self.kind == "lstm":
            made: nn.RNNBase = nn.LSTM(FEATURES, SIZE, proj_size=self.projection, **options)
        elif self.kind == "gru":
            made = nn.GRU(FEATURES, SIZE, **options)
        else:
            made = nn.RNN(FEATURES, SIZE, nonlinearity=self.kind, **options)
        return made.to(self.dtype).eval().requires_grad_(not self.frozen)

    def inputs(self, batch: int, length: int) -> list[Tensor]:
        """Inputs, and states if they are given."""
        torch.manual_seed(batch * 1000 + length)
        shape = (batch, length, FEATURES) if self.batch_first else (length, batch, FEATURES)
        tensors = [torch.randn(shape)]
        if self.states:
            count = self.layers * (2 if self.bidirectional else 1)
            sizes = [self.projection or SIZE, SIZE] if self.kind == "lstm" else [SIZE]
            tensors += [torch.randn(count, batch, size) for size in sizes]
        if not self.batched:
            tensors = [tensors[0].squeeze(0 if self.batch_first else 1), *(state.squeeze(1) for state in tensors[1:])]
        return [tensor.to(self.dtype) for tensor in tensors]

    def spec(self) -> ExportSpec:
        """A model with this layer, its batch and its length varying."""
        dimensions = ["batch", "length"] if self.batch_first else ["length", "batch"]
        if not self.batched:
            dimensions = ["length"]
        dynamic: dict[str, dict[int, str]] = {"x": dict(enumerate(f"{name}[1:64]" for name in dimensions))}
        if self.states and self.batched:
            dynamic |= {key: {1: "batch[1:64]"} for key in (("h", "c") if self.kind == "lstm" else ("h",))}
        inputs = tuple(self.inputs(3 if self.batched else 1, 7))
        return ExportSpec(OneLayer(self.layer()), inputs, dynamic_shapes=dynamic)


class OneLayer(nn.Module):
    """A layer, which may be given its states: `h`, and `c` for an LSTM."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Any:
        return self.layer(x, h if c is None else (h, c))


class Packed(nn.Module):
    """Sequences of different lengths, packed for one layer after the other, and unpacked."""

    def __init__(self, first: nn.RNNBase, second: nn.RNNBase, *, whole: bool, sorted: bool) -> None:
        super().__init__()
        self.first, self.second, self.whole, self.sorted = first, second, whole, sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=self.sorted)
        between, last = self.first(packed)
        found, state = self.second(between)
        padded, length = pad_packed_sequence(
            found, batch_first=True, padding_value=-1.5, total_length=x.shape[1] if self.whole else None
        )
        features = torch.cat([state[0] if isinstance(state, tuple) else state, x.new_zeros(1, x.shape[0], 1)], dim=2)
        return padded, length, last, features


def packed_spec(*, whole: bool = True, sorted: bool = False) -> ExportSpec:
    """Packed sequences; a spec for `exportkit export`, too."""
    torch.manual_seed(0)
    model = Packed(
        nn.LSTM(FEATURES, SIZE, 2, batch_first=True, bidirectional=True),
        nn.GRU(2 * SIZE, SIZE, batch_first=True),
        whole=whole,
        sorted=sorted,
    )
    dynamic = {"x": {0: "batch[1:64]", 1: "length[7:64]"}, "lengths": {0: "batch[1:64]"}}
    return ExportSpec(model.eval(), packed_inputs(3, 7), dynamic_shapes=dynamic)


def packed_inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences, and their lengths, of which the first is the greatest."""
    torch.manual_seed(batch * 1000 + length)
    lengths = torch.arange(batch).remainder(length).neg().add(length)
    return torch.randn(batch, length, FEATURES), lengths


class Both(nn.Module):
    """What one compiled package shows: layers over each other, and packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.RNN(FEATURES, SIZE, 2, nonlinearity="relu", batch_first=True)
        self.packed = packed_spec().model

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.rnn(x), self.packed(x, lengths)


def both() -> ExportSpec:
    """For `exportkit export`."""
    return ExportSpec(Both().eval(), packed_inputs(3, 7), dynamic_shapes=packed_spec().dynamic_shapes)
