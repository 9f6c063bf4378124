"""The model of the golden package with state: two methods, rows for each sample, a counter, a written input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exportkit import ExportSpec, Method

SLOTS = 6


class Memory(torch.nn.Module):
    """Remembers what it is given, and recalls what is alike.

    The memory begins with other elements than zeros, the counter with a zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key = torch.nn.Linear(4, 4)
        self.register_buffer("memory", torch.linspace(-1, 1, 4).repeat(3, SLOTS, 1))
        self.register_buffer("count", torch.tensor(0))

    def remember(self, features: Tensor) -> Tensor:
        """Writes features [batch, 4] to the next slot; returns how many there were."""
        slot = self.count.remainder(SLOTS).reshape(1)
        self.memory.index_copy_(1, slot, self.key(features).unsqueeze(1))
        self.count += 1
        return self.count - 1

    def recall(self, features: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """Returns what is alike [batch, 4], and adds to `seen` [batch, SLOTS] how much of each slot it is."""
        weights = (self.memory @ features.unsqueeze(-1)).squeeze(-1).softmax(-1)
        seen += weights
        return {"recalled": (weights.unsqueeze(1) @ self.memory).squeeze(1)}


def draw_sequence(
    sizes: Mapping[str, int], generator: torch.Generator
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Tensor]]]:
    """More is remembered than there are slots, and recalled in between."""
    batch, calls = sizes["batch"], []
    seen = torch.zeros(batch, SLOTS)
    for step in range(SLOTS + 2):
        features = torch.randn(batch, 4, generator=generator)
        calls.append(("remember", (features,), {}))
        if step % 3 == 0:
            calls.append(("recall", (features.roll(1, 0) + 0.5, seen), {}))
    return calls


def spec() -> ExportSpec:
    torch.manual_seed(0)
    features = torch.randn(3, 4)
    rows = {0: "batch[1:8]"}
    return ExportSpec(
        model=Memory(),
        methods={
            "remember": Method(example_inputs=(features,), dynamic_shapes={"features": rows}),
            "recall": Method(
                example_inputs=(features, torch.zeros(3, SLOTS)),
                dynamic_shapes={"features": rows, "seen": rows},
                writes=("seen",),
            ),
        },
        state={"memory": "batch", "count": None},
        draw_sequence=draw_sequence,
        name="golden-state",
    )
