"""LoRA adapters that each row of a session has for itself: https://arxiv.org/abs/2106.09685."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from exportkit.errors import UsageError


@dataclass(frozen=True)
class Lora:
    """Adapters of the low-rank kind.

    Attributes:
        rank: The greatest rank that an adapter may have.
        target_modules: The names of linear layers of the language model, as PEFT's: the whole one, or its end after a
            dot. "all-linear": all but the head.
    """

    rank: int = 16
    target_modules: Sequence[str] | str = ("q_proj", "v_proj")


class Adapters(nn.Module):
    """Two matrices for each row and linear layer, as buffers: zeros, which change nothing.

    Their names are `<layer>.lora_A.weight`, [batch, rank, inputs], and `<layer>.lora_B.weight`, [batch, outputs, rank].
    """

    def __init__(self, model: Any, lora: Lora, batch: int) -> None:
        """Makes them for the layers of a model of transformers.

        UsageError: the rank is no whole number, or a name is no linear layer of the language model.
        """
        super().__init__()
        if not isinstance(lora.rank, int) or lora.rank < 1:
            raise UsageError(f"the rank is {lora.rank!r}; it must be a whole number from 1 on")
        self._layers = [_targets(model, lora)]  # in a list: they are no submodules of this one
        for name, layer in self._layers[0].items():
            inputs, outputs = reversed(layer.weight.shape) if isinstance(layer, nn.Linear) else layer.weight.shape
            for matrix, shape in (("lora_A", (batch, lora.rank, inputs)), ("lora_B", (batch, outputs, lora.rank))):
                home = _submodule(self, f"{name}.{matrix}")
                home.register_buffer("weight", torch.zeros(shape, dtype=layer.weight.dtype, device=layer.weight.device))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Adds the adapters' part to what their layers answer, while the block runs."""
        with ExitStack() as hooks:
            for name, layer in self._layers[0].items():
                hooks.callback(layer.register_forward_hook(_Added(name, self.get_submodule(name))).remove)
            yield

    def set(self, given: Mapping[str, Tensor]) -> None:
        """Writes adapters over those that there are."""
        for name, own in self.named_buffers():
            own.copy_(given[name])

    def draw(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws adapters that change answers by about as much as trained ones do."""
        drawn = {}
        for name, own in self.named_buffers():
            scale = 1 / math.sqrt(own.shape[2]) if ".lora_A." in name else 0.2 / math.sqrt(own.shape[2])
            drawn[name] = (torch.randn((rows, *own.shape[1:]), generator=generator) * scale).to(own.dtype)
        return drawn


class _Added:
    """A hook of a linear layer over rows, [batch, count, inputs]."""

    def __init__(self, name: str, matrices: nn.Module) -> None:
        self._name = name
        self._first, self._second = (matrices.get_buffer(f"{each}.weight") for each in ("lora_A", "lora_B"))

    def __call__(self, layer: nn.Module, given: tuple[Tensor, ...], answer: Tensor) -> Tensor:
        (x,) = given
        if x.dim() != 3:
            said = f"{self._name} reads {list(x.shape)}, without rows, so that a row cannot have an adapter of its own"
            raise UsageError(said, hint="Leave it out of target_modules.")
        low = torch.bmm(x, self._first.transpose(1, 2))
        return answer + torch.bmm(low, self._second.transpose(1, 2))


def _targets(model: Any, lora: Lora) -> dict[str, Any]:
    """Returns the layers by name."""
    text, head = model.get_decoder(), model.get_output_embeddings()
    inside = set(text.modules()) | {head}
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module in inside
    }
    if lora.target_modules == "all-linear":
        return {name: module for name, module in linear.items() if module is not head}
    names = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    found: dict[str, Any] = {}
    for target in names:
        its = {name: module for name, module in linear.items() if f".{name}".endswith(f".{target}")}
        if not its:
            known = sorted({name.rpartition(".")[2] for name in linear})
            said = f"{target!r} of target_modules is no linear layer of {type(model).__name__}"
            raise UsageError(said, hint=f"Its layers' names end with {', '.join(known)}." if known else "It has none.")
        found |= its
    return found


def _submodule(root: nn.Module, name: str) -> nn.Module:
    for part in name.split("."):
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root
