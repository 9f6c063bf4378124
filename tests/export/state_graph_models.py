"""Models with state for CUDA graphs: a decoder of 65 state tensors, and calls that no graph can repeat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit import ExportSpec, Method

LENGTH, DIM, WORDS = 64, 128, 1 << 18


class Decoder(nn.Module):
    """Attention over caches that are written in place: a key and a value of each layer, and the position."""

    def __init__(self, layers: int = 32) -> None:
        super().__init__()
        self.layers = layers
        draw = torch.Generator().manual_seed(0)
        self.words = nn.Parameter(torch.randn(WORDS, DIM, generator=draw) / DIM**0.5)
        self.weights = nn.Parameter(torch.randn(layers, 3, DIM, DIM, generator=draw) / DIM**0.5)
        for layer in range(layers):
            self.register_buffer(f"key{layer}", torch.zeros(2, LENGTH, DIM))
            self.register_buffer(f"value{layer}", torch.zeros(2, LENGTH, DIM))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def prefill(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] from the first position on; returns the next token's scores [B, words]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self._advance(tokens, places)

    def step(self, token: Tensor) -> Tensor:
        """A token [B] at the next position; returns the scores [B, words] of the one behind it."""
        return self._advance(token[:, None], self.position.clone())

    def _advance(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(tokens, self.words)
        seen = torch.arange(LENGTH, device=tokens.device) <= places[:, None]
        for layer in range(self.layers):
            query, key, value = (x @ self.weights[layer, part] for part in range(3))
            keys, values = getattr(self, f"key{layer}"), getattr(self, f"value{layer}")
            keys.index_copy_(1, places, key)
            values.index_copy_(1, places, value)
            scores = (query @ keys.transpose(1, 2) / DIM**0.5).masked_fill(~seen, float("-inf"))
            x = x + scores.softmax(-1) @ values
        self.position.copy_((places[-1:] + 1) % LENGTH)  # a benchmark goes on for ever
        return x[:, -1] @ self.words.t()


class Selects(nn.Module):
    """The size of the result depends on values, so that a call waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return x[x.sum(-1) > 0] * 2


class Writes(nn.Module):
    """Writes an input of the caller's."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2 + x


def decoder(layers: int = 32) -> ExportSpec:
    return ExportSpec(
        model=Decoder(layers).eval(),
        methods={
            "prefill": Method(
                (torch.randint(0, WORDS, (2, 5)),), dynamic_shapes={"tokens": {0: "batch[1:16]", 1: "length[2:32]"}}
            ),
            "step": Method((torch.randint(0, WORDS, (2,)),), dynamic_shapes={"token": {0: "batch[1:16]"}}),
        },
        state={"key*": "batch", "value*": "batch", "position": None},
        name="decoder",
    )


def selects() -> ExportSpec:
    return ExportSpec(
        model=Selects(),
        example_inputs=(torch.randn(3, 8),),
        dynamic_shapes={"x": {0: "batch[1:256]"}},
        state=("total",),
        name="selects",
    )


def writes() -> ExportSpec:
    shape = {0: "batch[1:256]"}
    return ExportSpec(
        model=Writes(),
        example_inputs=(torch.randn(3, 8), torch.randn(3, 8)),
        dynamic_shapes={"x": shape, "total": shape},
        writes=("total",),
        name="writes",
    )
