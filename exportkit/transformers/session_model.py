"""A language model of transformers with its cache in buffers, and the methods `prefill` and `decode`.

What each layer remembers is found by asking it: a call of two tokens, and the cache that it made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from exportkit.errors import UsageError
from exportkit.transformers.adapters import Adapters
from exportkit.transformers.images import image_token
from exportkit.transformers.layers import LayerForm, cache_of
from exportkit.transformers.step_context import StepContext, taking

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of the argument: the newest version's first


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name of the argument of `forward` that takes the cache."""
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise UsageError(f"{type(model).__name__}.forward takes no cache", hint=_WHAT_WORKS)


def layer_forms(model: torch.nn.Module, length: int, prompt: int) -> list[LayerForm]:
    """Returns what each layer of a model remembers of a row of at most `length` tokens; a call adds `prompt`.

    A layer that sees a window keeps so many more than the window: the first token of a call sees what was before the
    call, and the last one is there as well. UsageError: the model makes no cache of layers, or one has a kind that is
    not known.
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
        said = f"layer {number} of {type(model).__name__} remembers in a {kind}, which is not supported"
        raise UsageError(said, hint=_WHAT_WORKS)
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
    "another one, write a module with methods over buffers: state.md of the documentation."
)


Tensors = Sequence[Mapping[str, Tensor]]


class SessionModel(nn.Module):
    """The model and what a session remembers. Each row of a batch is where it is: its own number of tokens so far.

    It is a ForCausalLM of transformers, in eval mode, whose layers remember `forms` of up to `length` tokens. The
    buffers are `position`, [batch], how many tokens each row has, and `cache.{layer}.{tensor}`, [batch, ...].
    """

    position: Tensor

    def __init__(
        self, model: Any, forms: Sequence[LayerForm], length: int, batch: int, adapters: Adapters | None = None
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.adapters = adapters
        device = next(model.parameters()).device
        self.cache = nn.ModuleList(_Buffers(form, batch, device) for form in forms)
        self.register_buffer("position", torch.zeros(batch, dtype=torch.int64, device=device))
        self.forms = tuple(forms)
        self.length = length
        self._argument = cache_argument(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._limited = any(form.attends for form in forms)
        self._recurs = any(form.recurs for form in forms)
        self._config = text_config(model)
        self._image_token = image_token(model)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Takes the next tokens of each row, [batch, count], of which there are `lengths`, [batch].

        A row's tokens come first; what follows them is not read. A row with none stays as it is. Returns the logits
        after each row's last token, [batch, vocabulary], in float32 or wider, or NaN where a row would have more tokens
        than the cache holds.
        """
        return self._prefill(tokens, lengths)

    def prefill_images(self, tokens: Tensor, lengths: Tensor, features: Tensor) -> Tensor:
        """Takes the next tokens of each row, as `prefill` does, among them those of images.

        In their place come features, [features, width], which the model makes of images: one for each, row after row.
        Where there are too few, the answer is NaN.
        """
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        image = (tokens == self._image_token) & real
        words = self.model.get_input_embeddings()(tokens.masked_fill(image, 0))
        missing = features.new_full((1, features.shape[1]), math.nan)
        place = (image.reshape(-1).cumsum(0) - 1).clamp(min=0, max=features.shape[0]).reshape(image.shape)
        images = torch.cat([features, missing]).to(words.dtype)[place]
        return self._prefill(torch.where(image[..., None], images, words), lengths)

    def _prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Takes tokens [batch, count], or their embeddings [batch, count, width]."""
        count = tokens.shape[1]
        lengths = lengths.clamp(0, count)
        if self._recurs:
            logits = self._one_by_one(tokens, lengths)
        else:
            column = torch.arange(count, device=tokens.device)
            shifted = (column - (count - lengths[:, None])).clamp(min=0)
            index = shifted if tokens.dim() == 2 else shifted[..., None].expand_as(tokens)
            aligned = tokens.gather(1, index)  # to the right: the last tokens are in one column
            step = StepContext.of(self.position, lengths, count, self.length)
            logits = self._logits(aligned, step, self._tensors())
        self.position += lengths
        return self._answer(logits)

    def decode(self, token: Tensor) -> Tensor:
        """Takes the next token of each row, [batch, 1]; returns the logits after it, as `prefill` does."""
        logits = self._logits(token, StepContext.one(self.position, self.length), self._tensors())
        self.position += 1
        return self._answer(logits)

    def adapt(self, adapters: dict[str, Tensor]) -> Tensor:
        """Gives each row an adapter in place of the one that it has, by the names of `Adapters`.

        Each `lora_B` is multiplied with the adapter's scale. Returns how many tokens each row has had, [batch]: the
        adapter is for those that follow.
        """
        assert self.adapters is not None
        self.adapters.set(adapters)
        return self.position.clone()

    def _answer(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.masked_fill((self.position > self.length)[:, None], math.nan) if self._limited else logits

    def _tensors(self) -> Tensors:
        return [{name: getattr(own, name) for name in form.shapes} for form, own in zip(self.forms, self.cache)]

    def _logits(
        self, tokens: Tensor, step: StepContext, tensors: Tensors, weights: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Calls the model, which writes into the tensors; returns the logits of the last column."""
        given: dict[str, Any] = {self._argument: cache_of(self.forms, tensors, step)}
        if self._takes_positions:
            given["position_ids"] = step.positions
        given |= {"input_ids" if tokens.dim() == 2 else "inputs_embeds": tokens, "use_cache": True, "logits_to_keep": 1}
        with taking(step, self._config), nullcontext() if self.adapters is None else self.adapters.applied():
            answer = self.model(**given) if weights is None else functional_call(self.model, weights, (), given)
        logits: Tensor = answer.logits[:, -1]
        return logits

    def _one_by_one(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Takes column after column, because a state knows only the token before; returns each row's last logits."""
        named = [(number, name) for number, form in enumerate(self.forms) for name in form.shapes]
        own = self._tensors()
        weights = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        states = tuple(own[number][name] for number, name in named)
        first = torch.zeros((), dtype=torch.int64, device=tokens.device)
        blank = torch.zeros((tokens.shape[0], self._config.vocab_size), dtype=self.model.dtype, device=tokens.device)

        def goes_on(index: Tensor, logits: Tensor, position: Tensor, *rest: Tensor) -> Tensor:
            return index < rest[len(states)].shape[1]

        def step(index: Tensor, logits: Tensor, position: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            before, (tokens, lengths), values = rest[: len(states)], rest[len(states) :][:2], rest[len(states) + 2 :]
            now = tuple(state.clone() for state in before)
            layers: list[dict[str, Tensor]] = [{} for _ in self.forms]
            for (number, name), tensor in zip(named, now):
                layers[number][name] = tensor
            step = StepContext.one(position, self.length)
            new = self._logits(tokens.index_select(1, index[None]), step, layers, dict(zip(weights, values)))
            live = index < lengths
            kept = [torch.where(_along(live, old), tensor, old) for tensor, old in zip(now, before)]
            return index + 1, torch.where(live[:, None], new, logits), position + live.to(torch.int64), *kept

        carried = (first, blank, self.position.clone(), *(state.clone() for state in states))
        others = (tokens, lengths, *weights.values())
        _, logits, _, *after = _repeat(goes_on, step, carried, others)
        for state, value in zip(states, after):
            state.copy_(value)
        return logits


def text_config(model: Any) -> Any:
    """Returns the configuration of a model's text part: its own, or a part of it."""
    return model.config.get_text_config(decoder=True)


def _along(rows: Tensor, tensor: Tensor) -> Tensor:
    return rows.reshape(-1, *(1 for _ in tensor.shape[1:]))


def _repeat(goes_on: Any, step: Any, carried: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Repeats a step: as an operator in a trace, else in Python."""
    if torch.compiler.is_compiling():
        from torch._higher_order_ops.while_loop import while_loop_op

        operator: Any = while_loop_op  # its annotation has one tensor
        return tuple(operator(goes_on, step, carried, others))
    while goes_on(*carried, *others):
        carried = step(*carried, *others)
    return carried


class _Buffers(nn.Module):
    """The tensors of one layer."""

    def __init__(self, form: LayerForm, batch: int, device: torch.device) -> None:
        super().__init__()
        for name, shape in form.shapes.items():
            self.register_buffer(name, torch.zeros((batch, *shape), dtype=form.dtypes[name], device=device))
