"""Finds what each layer of a model remembers, by asking it: a call of two tokens, and the cache that it made."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from exportkit.errors import UsageError
from exportkit.transformers.layers import LayerForm

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of the argument: the newest version's first


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name of the argument of `forward` that takes the cache."""
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise UsageError(f"{type(model).__name__}.forward takes no cache", hint=_WHAT_WORKS)


def layer_forms(model: torch.nn.Module, length: int, prompt: int) -> list[LayerForm]:
    """Returns what each layer of a model remembers of a row.

    Args:
        model: The model.
        length: How many tokens a row can have.
        prompt: How many tokens a call can add. A layer that sees a window keeps so many more than the window: the
            first token of a call sees what was before the call, and the last one is there as well.

    Raises:
        UsageError: The model makes no cache of layers, or one has a kind that is not known.
    """
    device = next(model.parameters()).device
    with torch.no_grad():
        answer: Any = model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=True)
    cache: Any = next((found for name in _CACHE_NAMES if (found := getattr(answer, name, None)) is not None), None)
    if not hasattr(cache, "layers"):
        raise UsageError(
            f"{type(model).__name__} remembers in a {type(cache).__name__}, which has no layers", hint=_WHAT_WORKS
        )
    return [_form(model, number, layer, length, prompt) for number, layer in enumerate(cache.layers)]


def _form(model: torch.nn.Module, number: int, layer: Any, length: int, prompt: int) -> LayerForm:
    kind = type(layer).__name__
    if kind == "DummyLayer":
        return LayerForm()
    known = isinstance(layer, (DynamicLayer, LinearAttentionCacheLayerMixin)) and "Indexed" not in kind
    if not known or type(layer).__module__ != cache_utils.__name__:  # one of a model's own may keep more
        raise UsageError(
            f"layer {number} of {type(model).__name__} remembers in a {kind}, which is not supported",
            hint=_WHAT_WORKS,
        )
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    window = None
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        slots = length if window is None else min(length, window - 1 + prompt)
        for name in ("keys", "values"):
            tensors[name] = getattr(layer, name)
            _, heads, _, width = tensors[name].shape
            shapes[name] = (heads, slots, width)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if not isinstance(layer.conv_states, dict):
            raise UsageError(
                f"layer {number} of {type(model).__name__} has states, which need transformers 5.18; this is "
                f"{transformers.__version__}"
            )
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for index, state in states.items():
                if state is not None:
                    tensors[f"{kind}{index}"] = state
                    shapes[f"{kind}{index}"] = tuple(state.shape[1:])
    return LayerForm(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, window)


_WHAT_WORKS = (
    "Models with full, sliding-window and chunked attention, and with convolution and recurrent states, work. For "
    "another one, write a module with methods over buffers: docs/state.md."
)
