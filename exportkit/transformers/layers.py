"""The layers of a cache whose tensors are buffers: transformers' interface to what a session remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from exportkit.transformers.step_context import StepContext

DummyLayer: Any = getattr(cache_utils, "DummyLayer", CacheLayerMixin)  # which came with transformers 5.2x


@dataclass(frozen=True)
class LayerForm:
    """What a layer remembers: the shapes and dtypes of its tensors without the batch, by name.

    They are keys and values [heads, slots, width], and states `conv0`, `recurrent0` and so on. Its attention sees a
    window of the last tokens, or all.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    window: int | None = None

    @property
    def attends(self) -> bool:
        """Whether it has keys and values."""
        return "keys" in self.shapes

    @property
    def recurs(self) -> bool:
        """Whether it has states that each token changes."""
        return any(name not in ("keys", "values") for name in self.shapes)


class Attending(CacheLayerMixin):
    """Keys and values [batch, heads, slots, width], written where each row is."""

    is_compileable = True  # then the model makes its masks always

    def __init__(self, tensors: Mapping[str, Tensor], step: StepContext, window: int | None) -> None:
        super().__init__()
        self.keys, self.values = tensors["keys"], tensors["values"]
        self.is_initialized = True
        self.is_sliding = window is not None
        self._step = step

    def lazy_initialization(self, *_: Any) -> None:
        """Does nothing: the tensors exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the keys and values [batch, heads, count, width] of the step; returns all."""
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            _write(kept, new.to(kept.dtype), self._step)
        return self.keys, self.values

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Returns the number of slots, and the place of the first one."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Returns 0: each row has its own, which the step knows."""
        return 0

    def get_max_length(self) -> int:
        """Returns the number of slots."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


def _write(kept: Tensor, new: Tensor, step: StepContext) -> None:
    """Writes the tokens of a step into a layer.

    A row that is full keeps what it has. Columns without a token write what the row's first token writes, too, or, if
    the row has none, what is there: an index must name some slot, and where two write one they write the same.
    """
    slots, rows = kept.shape[2], torch.arange(kept.shape[0], device=kept.device)[:, None]
    new = new.transpose(1, 2)  # [batch, count, heads, width], as an index that is split by a slice takes it
    fits = step.real & (step.positions < step.length)
    first = step.start[:, None].clamp(max=step.length - 1)
    places = torch.where(fits, step.positions, first) % slots
    if step.single:
        new = torch.where(fits[..., None, None], new, kept[rows, :, places])
    else:
        count = new.shape[1]
        begin = (count - step.lengths).clamp(0, count - 1)[:, None]  # the column of a row's first token
        writes = (step.lengths > 0)[:, None] & (step.start < step.length)[:, None]
        filler = torch.where(writes[..., None, None], new[rows, begin], kept[rows, :, first % slots])
        new = torch.where(fits[..., None, None], new, filler)
    kept[rows, :, places] = new


class Recurring(LinearAttentionLayer):
    """States that each token changes. They begin with zeros, which is as if nothing had come before."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        states = {kind: _numbered(tensors, kind) for kind in ("conv", "recurrent")}
        super().__init__(max(map(len, states.values())))
        for number, tensor in states["conv"].items():
            self.conv_states[number] = tensor
            self.conv_kernel_size[number] = tensor.shape[-1]
            self.is_conv_states_initialized[number] = True
        for number, tensor in states["recurrent"].items():
            self.recurrent_states[number] = tensor
            self.is_recurrent_states_initialized[number] = True
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)


class AttendingAndRecurring(Recurring, Attending):
    """A layer with both."""

    def __init__(self, tensors: Mapping[str, Tensor], step: StepContext, window: int | None) -> None:
        Attending.__init__(self, tensors, step, window)
        Recurring.__init__(self, tensors)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Does nothing: the tensors exist."""

    get_max_length = Attending.get_max_length


def _numbered(tensors: Mapping[str, Tensor], kind: str) -> dict[int, Tensor]:
    return {int(name.removeprefix(kind)): tensor for name, tensor in tensors.items() if name.startswith(kind)}


def cache_of(forms: Sequence[LayerForm], tensors: Sequence[Mapping[str, Tensor]], step: StepContext) -> Cache:
    """Returns transformers' cache of a model over the tensors of its layers, for the tokens of one call."""
    layers = []
    for form, own in zip(forms, tensors):
        if form.attends and form.recurs:
            layers.append(AttendingAndRecurring(own, step, form.window))
        elif form.attends:
            layers.append(Attending(own, step, form.window))
        elif form.recurs:
            layers.append(Recurring(own))
        else:
            layers.append(DummyLayer())
    return Cache(layers=layers)
