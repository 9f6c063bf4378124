"""Models with state and with several methods, small and of the forms that people write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exportkit import ExportSpec, Method


class Detector(nn.Module):
    """Carries the state of a recurrent cell from chunk to chunk, written in place."""

    def __init__(self, streams: int = 1) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 6)
        self.register_buffer("h", torch.zeros(streams, 6))
        self.register_buffer("c", torch.zeros(streams, 6))

    def forward(self, chunk: Tensor) -> Tensor:
        h, c = self.cell(chunk, (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return h.sum(1, keepdim=True).sigmoid()


def detector() -> ExportSpec:
    return ExportSpec(model=Detector(), example_inputs=(torch.randn(1, 8),), state=("h", "c"))


def streams() -> ExportSpec:
    """Any number of streams in one session."""
    return ExportSpec(
        model=Detector(),
        example_inputs=(torch.randn(3, 8),),
        dynamic_shapes={"chunk": {0: "streams[1:8]"}},
        state={"?": "streams"},
    )


class Cache(nn.Module):
    """Keys and values of one layer, and how many of them there are."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, slots, 8))
        self.register_buffer("v", torch.zeros(1, slots, 8), persistent=False)


class Decoder(nn.Module):
    """A layer of attention with a cache that is written at a position, which is state, too."""

    def __init__(self, slots: int = 16, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.cache = Cache(slots)
        self.register_buffer("position", torch.tensor(0))
        self.register_buffer("slots", torch.arange(slots))

    def _attend(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        places = self.position + torch.arange(ids.shape[1])
        self.cache.k.index_copy_(1, places, k)
        self.cache.v.index_copy_(1, places, v)
        scores = q @ self.cache.k.transpose(1, 2)
        scores = scores.masked_fill(self.slots[None, None] > places[None, :, None], float("-inf"))
        self.position += ids.shape[1]
        return self.head(scores.softmax(-1) @ self.cache.v)

    def prefill(self, ids: Tensor) -> Tensor:
        self.position.zero_()
        return self._attend(ids)[:, -1]

    def decode(self, token: Tensor) -> dict[str, Tensor]:
        return {"logits": self._attend(token)[:, -1], "position": self.position}

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mean(1)


def decoder() -> ExportSpec:
    rows = "batch[1:4]"
    ids = torch.randint(0, 11, (2, 5))
    return ExportSpec(
        model=Decoder(),
        methods={
            "prefill": Method(example_inputs=(ids,), dynamic_shapes={"ids": {0: rows, 1: "length[1:8]"}}),
            "decode": Method(example_inputs=(ids[:, :1],), dynamic_shapes={"token": {0: rows}}),
            "embed": Method(example_inputs=(ids,), dynamic_shapes={"ids": {0: rows, 1: "length[1:8]"}}),
        },
        state={"cache.*": "batch", "position": None},
    )


class InPlace(nn.Module):
    """Writes into the cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: list[Tensor], position: Tensor) -> Tensor:
        cache[0].index_copy_(0, position, self.linear(x))
        cache[1].index_copy_(0, position, x)
        return (cache[0] * cache[1]).sum(0)


def in_place() -> ExportSpec:
    inputs = (torch.randn(2, 4), [torch.zeros(6, 4), torch.ones(6, 4)], torch.tensor([1, 3]))
    return ExportSpec(model=InPlace(), example_inputs=inputs, writes=("cache",))


class Assigned(nn.Module):
    """Assigns to its buffers, which change places, and returns one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("new", torch.full((3,), 2.0))
        self.register_buffer("old", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.old, self.new = self.new, self.new * 0.5 + x
        return self.new[:2], self.old


def assigned() -> ExportSpec:
    return ExportSpec(model=Assigned(), example_inputs=(torch.ones(3),), state=("old", "new"))


class Tied(nn.Module):
    """Two modules over one buffer; each counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Module(), nn.Module()
        self.one.register_buffer("count", torch.zeros(2, dtype=torch.int32))
        self.two.register_buffer("count", self.one.count)

    def forward(self, x: Tensor) -> Tensor:
        self.one.count += 1
        self.two.count[0] += 1
        return x * self.one.count


class Writes(nn.Module):
    """Runs a function that gets the module: what it may write is a buffer, a parameter, or a view of one."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(3, 3)
        self.register_buffer("h", torch.zeros(2, 3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("unused", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)
