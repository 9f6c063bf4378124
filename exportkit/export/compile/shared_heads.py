"""Attention of one query whose heads share keys and values, in the code for CPUs (docs/adr/0072).

ATen's kernel takes heads one by one. With one query it reads shared keys and values anew for each head, and in bfloat16
and float16 it leaves the processor's fast instructions unused. So heads that share keys become queries of one head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from exportkit.export.compile.inductor_changes import taken_apart

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def shared_heads() -> AbstractContextManager[None]:
    """Takes attention of one query for attention of the heads that share keys while the block runs."""
    return taken_apart(_ATTENTION, heads_as_queries)


def heads_as_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Writes attention of one query so that heads with the same keys are queries of one head.

    Args:
        query: [batch, heads, 1, width].
        key: [batch, heads that share, length, width].
        value: As key.
        dropout_p: The probability that a weight is dropped.
        is_causal: Whether the query sees the first key alone.
        attn_mask: What is added to the scores: [1, length], or [batch or 1, heads or 1, 1, length].
        scale: By what scores are multiplied; the default is width ** -0.5.

    Returns:
        The attention, as query, and the logarithms of the sums, [batch, heads, 1]; NotImplemented where nothing is
        shared or there may be more queries.
    """
    (batch, heads, count, width), shared = query.shape, key.shape[1]
    if not isinstance(count, int) or count != 1 or heads == shared or is_causal:
        return NotImplemented
    if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] != 1:
        attn_mask = attn_mask.reshape(attn_mask.shape[0], shared, heads // shared, attn_mask.shape[3])
    attended, sums = _ATTENTION(
        query.reshape(batch, shared, heads // shared, width),
        key,
        value,
        dropout_p,
        attn_mask=attn_mask,
        scale=scale,
    )
    return attended.reshape(batch, heads, 1, width), sums.reshape(batch, heads, 1)
