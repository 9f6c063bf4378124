"""Says how a language model of transformers is exported: `spec(model)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from exportkit.errors import UsageError
from exportkit.export.record.cases import MAX_CASE_BYTES
from exportkit.spec import ExportSpec, Method
from exportkit.transformers.adapters import Adapters, Lora
from exportkit.transformers.images import draw_images, image_token, prompt_with_images
from exportkit.transformers.layers import LayerForm
from exportkit.transformers.session_model import SessionModel, layer_forms, text_config
from exportkit.transformers.step_context import ATTENTION, current, register

_EXAMPLE = 7  # tokens of the example prompt
_STEPS = 2  # that are tried after it
_OF_ITS_OWN = (
    "It does something of its own with positions, masks or the cache. Write a module with methods over buffers: "
    "state.md of the documentation."
)
_WITH_IMAGES = (
    "It does something of its own with the positions or masks of images. Leave `images` out: the text part is exported "
    "without."
)


def spec(
    model: nn.Module,
    *,
    cache_length: int,
    prompt: int = 512,
    batch: int = 8,
    images: Mapping[str, Any] | None = None,
    adapters: Lora | None = None,
    name: str | None = None,
) -> ExportSpec:
    """Returns how to export a language model with the methods `prefill` and `decode`.

    `prefill(tokens, lengths)` takes the next tokens of each row, [batch, count], and how many each has; `decode(token)`
    takes one of each, [batch, 1]. Both return the logits after each row's last token, [batch, vocabulary], in float32,
    or NaN where a row has more tokens than the cache holds. Each session has a cache of its own and any number of rows
    up to `batch`, each with a position of its own.

    With `images` there is `prefill_images(tokens, lengths, features)` as well, which reads features of images in the
    places of their tokens. A package of `vision_spec` makes them.

    With `adapters`, each row has a LoRA adapter of its own, at first none. `session.load_state(file, partial=True)`
    loads PEFT's, and the method `adapt(adapters)` takes tensors, by the names of `session.state` after `adapters.`.

    Args:
        model: A model for causal language modelling, such as AutoModelForCausalLM or AutoModelForImageTextToText
            returns, in eval mode, or PEFT's around it. It is not changed.
        cache_length: How many tokens, prompt and answer, a row can have.
        prompt: How many tokens one `prefill` can add. A longer prompt takes several calls.
        batch: How many rows a session can have.
        images: What a processor makes of an example of images, such as {"pixel_values": pixels}.
        adapters: Which adapters a row can have.
        name: The package's name. Default: the model's type, such as `llama`.

    Raises:
        UsageError: The model is none of these, or has a part that is not supported, or does not answer in steps what it
            answers at once. The message names it.
    """
    model = checked_model(model)
    config = text_config(model)
    _check_sizes(model, config, cache_length, prompt, batch)
    rows, count = min(batch, 2), max(min(prompt, 2), min(prompt, _EXAMPLE, cache_length - _STEPS))
    forms = layer_forms(model, cache_length, prompt)
    added = None if adapters is None else _adapters(model, forms, adapters, rows)
    session = SessionModel(model, forms, cache_length, rows, added).eval()
    device = session.position.device
    drawer = _Drawer(config.vocab_size, cache_length, added)
    tokens, lengths = (each.to(device) for each in drawer.prompt(rows, count, torch.Generator().manual_seed(0)))
    _check_turns(session, tokens)
    by_batch = {0: f"batch[1:{batch}]"} if batch > 1 else {}
    by_count = {1: f"count[1:{prompt}]"} if prompt > 1 else {}
    by_prompt = {"tokens": {**by_batch, **by_count}, "lengths": by_batch}
    methods = {
        "prefill": Method(example_inputs=(tokens, lengths), dynamic_shapes=by_prompt, draw_inputs=drawer.prefill),
        "decode": Method(
            example_inputs=(tokens[:, :1].contiguous(),), dynamic_shapes={"token": by_batch}, draw_inputs=drawer.decode
        ),
    }
    if added is not None:
        (example,), _ = drawer.adapt({"batch": rows}, torch.Generator().manual_seed(0))
        methods["adapt"] = Method(
            example_inputs=({name: tensor.to(device) for name, tensor in example.items()},),
            dynamic_shapes={"adapters": dict.fromkeys(example, by_batch)},
            draw_inputs=drawer.adapt,
        )
    if images is not None:
        _check_images(session, images)

        def draw(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
            (tokens, lengths), none = drawer.prefill(sizes, generator)
            return draw_images(tokens, lengths, model, sizes.get("features", 1), generator), none

        sizes = {"batch": rows, "count": count, "features": 2}
        methods["prefill_images"] = Method(
            example_inputs=tuple(each.to(device) for each in draw(sizes, torch.Generator())[0]),
            dynamic_shapes={**by_prompt, "features": {0: f"features[1:{max(2, batch * prompt)}]"}},
            draw_inputs=draw,
        )
    return ExportSpec(
        model=session,
        name=name or getattr(config, "model_type", None),
        methods=methods,
        state=dict.fromkeys(_state_patterns(session), "batch" if batch > 1 else None),
        draw_sequence=drawer.session,
    )


def _state_patterns(session: SessionModel) -> list[str]:
    return [
        "position",
        *(["cache.*"] if any(True for _ in session.cache.buffers()) else []),
        *(["adapters.*"] if session.adapters is not None else []),
    ]


def _adapters(model: Any, forms: Sequence[LayerForm], lora: Lora, batch: int) -> Adapters:
    if any(form.recurs for form in forms):
        said = f"{type(model).__name__} has states that each token changes, with which adapters are not supported"
        raise UsageError(said, hint="Leave `adapters` out, and export PEFT's model around it.")
    if any(".lora_A." in name for name, _ in model.named_parameters()):
        said = f"{type(model).__name__} has adapters of PEFT's in it already"
        raise UsageError(said, hint="Give the model without: model.unload() of PEFT's returns it.")
    made = Adapters(model, lora, batch)
    held, most = sum(buffer.nbytes for buffer in made.buffers()), 4 * MAX_CASE_BYTES
    if held > most:
        said = f"adapters of rank {lora.rank} take {held:,} bytes for {batch} rows; a recorded session holds {most:,}"
        raise UsageError(said, hint="Give a smaller rank, or fewer target_modules.")
    return made


def checked_model(model: nn.Module) -> Any:
    """Returns the model of transformers, which may be in a model of PEFT, and makes exportkit's attention known.

    UsageError: it is no language model that reads tokens and predicts the next one.
    """
    from transformers import PreTrainedModel

    kind = type(model).__name__
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UsageError(
            f"{kind} puts learned tokens before the prompt, which the model inside does not know",
            hint="Export it as it is: exportkit.ExportSpec(model=model, example_kwargs={'input_ids': ids, ...}).",
        )
    base = getattr(model, "get_base_model", None)  # PEFT's: with LoRA's and other layers in their places
    inner: Any = base() if base is not None else model
    if not isinstance(inner, PreTrainedModel):
        raise UsageError(
            f"the model is a {kind}, which is none of transformers'",
            hint="Give what AutoModelForCausalLM.from_pretrained returns, or PEFT's model around it.",
        )
    if not inner.can_generate() or (inner.main_input_name != "input_ids" and image_token(inner) is None):
        raise UsageError(
            f"{kind} does not generate from tokens",
            hint="Give a model with a head for the next token: what AutoModelForCausalLM.from_pretrained returns. "
            "Export another one as it is: exportkit.ExportSpec(model=model, example_kwargs=...).",
        )
    if getattr(inner.config, "is_encoder_decoder", False):
        raise UsageError(
            f"{kind} has an encoder and a decoder; a model whose prompt and answer are one sequence is supported",
            hint="Export its encoder with exportkit.ExportSpec, and write a module with methods for its decoder: "
            "state.md of the documentation.",
        )
    if inner.training:
        raise UsageError(f"{kind} is in training mode", hint="Call model.eval().")
    register()
    register_experts()
    return inner


def _check_sizes(model: nn.Module, config: Any, cache_length: int, prompt: int, batch: int) -> None:
    for what, number in (("cache_length", cache_length), ("prompt", prompt), ("batch", batch)):
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{what} is {number!r}; it must be a whole number from 1 on")
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and cache_length > most:
        said = f"cache_length is {cache_length}, and {type(model).__name__} has {most} positions"
        raise UsageError(said, hint=f"Give at most {most}.")
    if prompt > cache_length:
        said = f"prompt is {prompt}, and the cache holds {cache_length} tokens"
        raise UsageError(said, hint=f"Give a prompt of at most {cache_length}, or a longer cache.")


def _check_turns(session: SessionModel, tokens: Tensor) -> None:
    """Refuses a model that does not answer in steps, over the cache, what it answers at once.

    A model may do something of its own with positions, masks or the cache. Then this finds it, not a user.
    """
    rows, count = tokens.shape
    text = torch.cat([tokens, tokens, tokens], dim=1)
    lengths = torch.tensor([max(1, count - 3 * row) for row in range(rows)], device=tokens.device)
    with torch.no_grad(), _put_back(session):
        found = [session.prefill(tokens, lengths)]
        for step in range(min(_STEPS, session.length - count)):
            found.append(session.decode(text.gather(1, (lengths + step)[:, None])))
        for row in range(rows):
            for step, answer in enumerate(found):
                known = text[row : row + 1, : int(lengths[row]) + step]
                whole = session.model(input_ids=known, use_cache=False).logits[0, -1].to(answer.dtype)
                _compare(session.model, whole, answer[row])


def _check_images(session: SessionModel, inputs: Mapping[str, Any]) -> None:
    """Refuses a model that does more with images than to read their features in the places of tokens."""
    model = session.model
    if image_token(model) is None or any(form.recurs for form in session.forms):
        said = f"{type(model).__name__} does not read features of images in the places of tokens"
        raise UsageError(said, hint="Leave `images` out: the text part is exported without.")
    states: list[Tensor] = []  # after all tokens: the words after images see little of them

    def keep(_: Any, __: Any, answer: Any) -> None:
        states.append(answer.last_hidden_state[0])

    with torch.no_grad(), _hooked(model.get_decoder(), keep):
        tokens, features, whole = prompt_with_images(model, inputs)
        count = tokens.shape[1]
        alone = SessionModel(model, layer_forms(model, count, count), count, 1)
        answer = alone.prefill_images(tokens, torch.tensor([count], device=tokens.device), features)[0]
    for one, other in ((whole.to(answer.dtype), answer), (states[0], states[-1])):
        _compare(model, one, other, "answers to images", _WITH_IMAGES)


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _put_back(session: SessionModel) -> Iterator[None]:
    """Empties the buffers again at the end."""
    yield
    for tensor in (session.position, *session.cache.buffers()):
        tensor.zero_()


def _compare(model: Any, whole: Tensor, answer: Tensor, what: str = "logits", hint: str = _OF_ITS_OWN) -> None:
    allowed = 1e-3 if torch.finfo(model.dtype).eps < 1e-6 else 0.2  # in half precision, experts may change
    error = float((answer - whole).abs().mean() / whole.std().clamp(min=1e-30))
    if not error <= allowed:  # NaN, too
        raise UsageError(
            f"{type(model).__name__} answers otherwise over exportkit's cache than without a cache: its {what} differ "
            f"by {error:.1g} of their standard deviation",
            hint=hint,
        )


class _Drawer:
    """Draws calls whose tokens are of the vocabulary and whose lengths fit."""

    def __init__(self, vocabulary: int, length: int, adapters: Adapters | None) -> None:
        self._vocabulary = vocabulary
        self._length = length
        self._adapters = adapters

    def prompt(self, rows: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens [rows, count], and lengths."""
        lengths = torch.randint(1, count + 1, (rows,), generator=generator)
        return self._tokens(rows, count, generator), lengths

    def prefill(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `prefill`."""
        return self.prompt(sizes.get("batch", 1), sizes.get("count", 1), generator), {}

    def decode(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `decode`."""
        return (self._tokens(sizes.get("batch", 1), 1, generator),), {}

    def adapt(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `adapt`."""
        assert self._adapters is not None
        return (self._adapters.draw(sizes.get("batch", 1), generator),), {}

    def session(
        self, sizes: Mapping[str, int], generator: torch.Generator
    ) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """A prompt, three tokens, adapters, a second prompt of at most four, and a token more."""
        (tokens, lengths), none = self.prefill(sizes, generator)
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("prefill", (tokens, lengths.clamp(max=max(1, self._length - 8))), none)
        ]
        calls += [("decode", *self.decode(sizes, generator)) for _ in range(3)]
        if self._adapters is not None:
            calls.append(("adapt", *self.adapt(sizes, generator)))
        calls.append(("prefill", *self.prefill({**sizes, "count": min(sizes.get("count", 1), 4)}, generator)))
        calls.append(("decode", *self.decode(sizes, generator)))
        return calls

    def _tokens(self, rows: int, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self._vocabulary, (rows, count), generator=generator)


def run_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes a mixture by transformers' interface of experts, for states [tokens, width] and experts [tokens, k].

    One token of each row reads the weights of its experts only. A prompt, which reaches most experts anyway, is
    computed by all of them: that takes more operations, and no memory for copies of weights.
    """
    if current().single:
        from transformers.integrations.moe import batched_mm_experts_forward

        chosen: Tensor = batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return chosen
    return run_all_experts(experts, hidden_states, top_k_index, top_k_weights)


def run_all_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes a mixture with all experts for each token. Arguments as for `run_experts`."""
    names = ("gate_up_proj", "down_proj") if experts.has_gate else ("up_proj", "down_proj")
    inner = _products(experts, names[0], hidden_states.expand(experts.num_experts, *hidden_states.shape))
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    each = _products(experts, names[1], inner)  # [experts, tokens, width]
    if getattr(experts, "has_post_expert_norm", False):  # since transformers 5.18
        each = experts.post_expert_norm(each)
    weights = each.new_zeros((hidden_states.shape[0], experts.num_experts))
    weights = weights.scatter(1, top_k_index, top_k_weights.to(each.dtype))
    return torch.einsum("te,etw->tw", weights, each).to(hidden_states.dtype)


def _products(experts: Any, name: str, x: Tensor) -> Tensor:
    weight = getattr(experts, name)
    product = torch.bmm(x, weight if experts.is_transposed else weight.transpose(1, 2))
    return product + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else product


def register_experts() -> None:
    """Makes these experts known to transformers under the attention's name, in versions that have an interface."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION, run_experts)
