"""Models with state, which the tests of sequences export and verify."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import exportkit

LENGTH, WIDTH, LAYERS = 16, 8, 2


class Decoder(nn.Module):
    """Two layers of attention over a cache that it writes at its position, and a counter of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 16)
        for layer in range(LAYERS):
            self.register_buffer(f"keys_{layer}", torch.zeros(2, LENGTH, WIDTH))
            self.register_buffer(f"values_{layer}", torch.zeros(2, LENGTH, WIDTH))
        self.register_buffer("bias", torch.linspace(-1, 1, 16).expand(2, 16).clone())
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def prefill(self, ids: Tensor) -> Tensor:
        """Takes the first tokens [batch, n] of a text, and gives the scores of the next one [batch, 16]."""
        return self._tokens(ids)

    def decode(self, token: Tensor, heard: Tensor) -> Tensor:
        """Takes one token [batch, 1], and writes what the first layer made of it into `heard` [batch, WIDTH]."""
        self._hear(heard, self.embed(token)[:, 0] * 2)
        return self._tokens(token)

    def similar(self, x: Tensor, y: Tensor) -> Tensor:
        """Compares vectors [n, WIDTH]; it has no state."""
        return (self.head(x) * self.head(y)).sum(-1)

    def _hear(self, heard: Tensor, value: Tensor) -> None:
        heard.copy_(value)

    def _advance(self, count: int) -> None:
        self.position.add_(count)

    def _tokens(self, ids: Tensor, *, keep: bool = True) -> Tensor:
        x = self.embed(ids)
        places = self.position + torch.arange(ids.shape[1])
        seen = torch.arange(LENGTH)[None, :] <= places[:, None]
        for number, layer in enumerate(self.layers):
            keys, values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
            query, key, value = layer(x).chunk(3, -1)
            keys.index_copy_(1, places, key)
            if keep or number == 0:
                values.index_copy_(1, places, value)
            scores = (query @ keys.transpose(1, 2)).masked_fill(~seen, -torch.inf)
            x = x + torch.softmax(scores, -1) @ values
        self._advance(ids.shape[1])
        answer = self.head(x[:, -1]) + self.bias
        self.bias.mul_(0.5).add_(answer * 0.125)
        return answer


class Stale(Decoder):
    """Does not write the values of the last layer when it decodes."""

    def decode(self, token: Tensor, heard: Tensor) -> Tensor:
        self._hear(heard, self.embed(token)[:, 0] * 2)
        return self._tokens(token, keep=False)


class OffByOne(Decoder):
    """Advances one place too far when it decodes."""

    def decode(self, token: Tensor, heard: Tensor) -> Tensor:
        answer = super().decode(token, heard)
        self.position.add_(1)
        return answer


class Unheard(Decoder):
    """Leaves its written input as it is."""

    def _hear(self, heard: Tensor, value: Tensor) -> None:
        heard.mul_(1)


MODELS = {kind.__name__: kind for kind in (Decoder, Stale, OffByOne, Unheard)}


class Counter(nn.Module):
    """Adds what it hears, counts the calls, and forgets a little: a small model with one method."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 4))
        self.register_buffer("gain", torch.tensor([1.0, 2.0, -1.0, 0.5]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [2, 4]."""
        self.calls.add_(1)
        self.total.mul_(0.75).add_(x * self.gain)
        self.gain.mul_(1.25)
        return self.total / self.calls


def counter() -> exportkit.ExportSpec:
    """The counter, with all of its buffers as state."""
    torch.manual_seed(1)
    return exportkit.ExportSpec(model=Counter(), example_inputs=(torch.randn(2, 4),), state=("*",))


def decoder(kind: str = "Decoder") -> exportkit.ExportSpec:
    """The decoder, whose sessions may have any batch, or a wrong one."""
    torch.manual_seed(1)
    ids = torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(2))
    return exportkit.ExportSpec(
        model=MODELS[kind](),
        methods={
            "prefill": exportkit.Method((ids,), dynamic_shapes={"ids": {0: "batch[1:4]", 1: "n[1:6]"}}),
            "decode": exportkit.Method(
                (ids[:, :1], torch.zeros(2, WIDTH)),
                dynamic_shapes={"token": {0: "batch[1:4]"}, "heard": {0: "batch[1:4]"}},
                writes=("heard",),
            ),
            "similar": exportkit.Method(
                (torch.randn(3, WIDTH), torch.randn(3, WIDTH)),
                dynamic_shapes={"x": {0: "count[1:8]"}, "y": {0: "count[1:8]"}},
            ),
        },
        state={"keys_*": "batch", "values_*": "batch", "bias": "batch", "position": None},
    )
