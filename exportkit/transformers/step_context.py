"""What one call adds to a cache: the new positions of each row of a batch, and the attention that they get.

The functions are registered with transformers under one name, as its documentation says for attention of one's own. A
model then makes its own kinds of masks (causal, in a window, in chunks) over the positions of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from exportkit.errors import UsageError

ATTENTION = "exportkit"
"""The name of the attention, and of the experts, in transformers."""

_CHOICES = ("_attn_implementation", "_experts_implementation")  # of a configuration


@dataclass(frozen=True)
class StepContext:
    """The tokens of one call, aligned to the right: a row's last token is in the last column.

    A row has had `start` tokens before, and has `lengths` now, [batch], and at most `length`. By column, [batch,
    count], there are `real`, where it has a token, and `positions`, the token's in its row, or else the row's first new
    position. `single`: there is one column, and each row has a token there.
    """

    start: Tensor
    lengths: Tensor
    positions: Tensor
    real: Tensor
    single: bool
    length: int

    @staticmethod
    def of(start: Tensor, lengths: Tensor, count: int, length: int) -> StepContext:
        """Returns the step of `count` columns."""
        column = torch.arange(count, device=start.device)
        place = column - (count - lengths[:, None])  # of a column among its row's tokens; below 0 there is none
        return StepContext(start, lengths, start[:, None] + place.clamp(min=0), place >= 0, False, length)

    @staticmethod
    def one(start: Tensor, length: int) -> StepContext:
        """Returns the step of one token in each row."""
        positions = start[:, None]
        return StepContext(
            start, torch.ones_like(start), positions, torch.ones_like(positions, dtype=torch.bool), True, length
        )

    def held(self, slots: int) -> Tensor:
        """Returns the position that each slot of a layer holds after this step, [batch or 1, slots]; below 0 none.

        A layer with fewer slots than a row can have tokens is a ring: slot s holds the last position that is s modulo
        the number of slots.
        """
        slot = torch.arange(slots, device=self.start.device)[None]
        if slots >= self.length:
            return slot
        last = (self.start + self.lengths)[:, None] - 1
        return last - (last - slot) % slots


_TURN: ContextVar[StepContext | None] = ContextVar("step", default=None)


@contextmanager
def taking(step: StepContext, config: Any) -> Iterator[None]:
    """Gives the model of a configuration this attention, over the positions of a step, while the block runs."""
    before = {name: getattr(config, name) for name in _CHOICES if hasattr(config, name)}
    token = _TURN.set(step)
    try:
        for name in before:
            setattr(config, name, ATTENTION)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
        _TURN.reset(token)


def current() -> StepContext:
    """Returns the step of the call that is running."""
    step = _TURN.get()
    if step is None:
        said = f"the attention {ATTENTION!r} runs in exportkit's methods only"
        raise UsageError(said, hint='Give the model another one: model.set_attn_implementation("sdpa").')
    return step


def mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> Tensor:
    """Returns what is added to scores, [batch, 1, count, slots], by transformers' interface of masks.

    It is 0 where a query may look, and elsewhere the least number: a row that sees nothing shall have numbers, too. Of
    a mask of bool, attention would make it in each layer.
    """
    step = current()
    device = step.start.device
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    held = step.held(kv_length)[:, None, None, :]
    allowed = mask_function(rows, heads, step.positions[:, None, :, None], held) & (held >= 0)
    added = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return added.expand(batch_size, 1, step.positions.shape[1], kv_length)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attends by transformers' interface of attention: query [batch, heads, count, width], returned transposed."""
    if others.get("position_bias") is not None:
        raise UsageError(f"{type(module).__name__} adds a bias of its own to the attention, which is not supported")
    if softcap is None and s_aux is None:
        added, grouped = attention_mask.to(query.dtype), query.shape[1] != key.shape[1]
        attended = scaled_dot_product_attention(query, key, value, added, scale=scaling, enable_gqa=grouped)
    else:
        attended = _explicit(query, key, value, attention_mask, scaling or query.shape[-1] ** -0.5, softcap, s_aux)
    return attended.transpose(1, 2), None


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention whose scores are capped, or that has a sink in each head: a score without a value."""
    batch, heads, count, width = query.shape
    groups = heads // key.shape[1]
    if current().single:  # heads that share keys and values are queries of one head: nothing is repeated
        query = query.reshape(batch, key.shape[1], groups, width)
    else:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = (query @ key.transpose(-2, -1)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + added
    if sinks is not None:
        sink = sinks.float().reshape(1, scores.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    attended = weights.to(value.dtype) @ value
    return attended.reshape(batch, heads, count, value.shape[-1])


def register() -> None:
    """Makes this attention known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask)
