"""exportkit.transformers.spec makes what is exported, refuses what it does not support, and says what to do."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import llm
from exportkit.errors import UsageError
from exportkit.transformers import spec, vision_spec
from tests.export.function_models import traced
from tests.subprocesses import run_python

_TINY = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def t5() -> Any:
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**_TINY)).eval()


def detr() -> Any:
    backbone = transformers.ResNetConfig()
    config = transformers.DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone)
    with torch.device("meta"):
        return transformers.DetrForObjectDetection(config).eval()


def llama() -> Any:
    return llm.small_model("llama")


def indexed() -> Any:
    """A model whose attention has an index of its own."""
    model = llama()
    forward = model.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        answer = forward(*args, **kwargs)
        layer = answer.cache.layers[1]
        answer.cache.layers[1] = type("DynamicIndexedLayer", (type(layer),), {})()
        return answer

    other.__signature__ = inspect.signature(forward)
    model.forward = other
    return model


def counting() -> Any:
    """A model that takes positions of its own: those of a call, not those of a text."""
    model = llama()
    inner = model.model.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(kwargs["input_ids"].shape[1])[None]
        return inner(*args, **kwargs)

    model.model.forward = other
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), {}, "none of transformers'(?s:.*)AutoModelForCausalLM"),
        (t5, {}, "T5ForConditionalGeneration has an encoder and a decoder(?s:.*)state.md of the doc"),
        (bert, {}, "BertModel does not generate from tokens(?s:.*)AutoModelForCausalLM"),
        (detr, {}, r"does not generate from tokens(?s:.*)exportkit\.ExportSpec"),  # for all its decoder
        (lambda: llama().train(), {}, "training mode(?s:.*)eval"),
        (llama, {"cache_length": 600}, "cache_length is 600, and LlamaForCausalLM has 512 positions(?s:.*)at most 512"),
        (llama, {"prompt": 65}, "prompt is 65, and the cache holds 64 tokens"),
        (llama, {"batch": 0}, "batch is 0"),
        (llama, {"cache_length": "64"}, "cache_length is '64'"),
        (indexed, {}, "layer 1 of LlamaForCausalLM remembers in a DynamicIndexedLayer(?s:.*)state.md of the doc"),
        (counting, {}, "answers otherwise over exportkit's cache than without a cache(?s:.*)positions"),
    ],
)
def test_it_refuses_with_the_name_and_a_way_out(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        spec(make(), **{"cache_length": 64, "prompt": 8, **options})
    assert caught.value.hint or "must be" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "prompt", "batch"), [(3, 2, 2), (2, 2, 3), (5, 3, 1), (1, 1, 2), (1, 1, 1)])
def test_odd_sizes_trace(length: int, prompt: int, batch: int) -> None:
    made = spec(llama(), cache_length=length, prompt=prompt, batch=batch)
    found = traced(made, cases=2, edge_cases=False)
    ends = {d.name: (d.min, d.max) for method in found.methods for d in method.call.dimensions}
    wanted = {"batch": (1, batch), "count": (1, prompt)}
    assert ends == {name: size for name, size in wanted.items() if size[1] > 1}


def test_without_transformers_the_import_says_what_to_install(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["transformers"] = None
try:
    import exportkit.transformers
except ModuleNotFoundError as error:
    print(error)
import exportkit.cli, exportkit.export.artifact, exportkit.runtime.loader  # need none
"""
    assert "pip install 'exportkit[transformers]'" in run_python(script, cwd=tmp_path)


# --- images: the text part, what is made of images, and prompts in which that replaces tokens ------------------------


_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
}
_IMAGE = 60
PIXELS = {"pixel_values": torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def llava() -> Any:
    torch.manual_seed(0)
    seeing, text = transformers.CLIPVisionConfig(**_VISION, patch_size=8), transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(vision_config=seeing, text_config=text, image_token_index=_IMAGE)
    config.image_token_id = _IMAGE
    return transformers.LlavaForConditionalGeneration(config).eval()


def gemma3() -> Any:
    """A model in which the tokens of an image see one another, also those that come later."""
    torch.manual_seed(0)
    seeing = transformers.SiglipVisionConfig(**_VISION, patch_size=8)
    text = transformers.Gemma3TextConfig(**_TEXT, sliding_window=16)
    places = {"image_token_index": _IMAGE, "image_token_id": _IMAGE, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(vision_config=seeing, text_config=text, **places)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_rows_with_images_get_the_logits_that_the_model_answers_with_pixels() -> None:
    model = llava()
    made = spec(model, cache_length=64, prompt=40, batch=2, images=PIXELS)
    assert list(made.entries) == ["prefill", "decode", "prefill_images"]
    features = vision_spec(model, PIXELS).model(**PIXELS)
    each = len(features) // 2
    texts = [[1, *[_IMAGE] * each, 2, 3], [*[_IMAGE] * each, 4]]
    tokens = torch.zeros((2, each + 3), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    tokens[1, len(texts[1]) :] = _IMAGE  # not read
    session: Any = made.model
    with torch.no_grad():
        found = session.prefill_images(tokens, torch.tensor([len(text) for text in texts]), features)
        for row, text in enumerate(texts):
            pixels = PIXELS["pixel_values"][row : row + 1]
            whole = model(input_ids=torch.tensor([text]), pixel_values=pixels, use_cache=False).logits[0, -1]
            torch.testing.assert_close(found[row], whole, rtol=1e-4, atol=1e-4)
        assert session.prefill_images(tokens[:, :4], torch.tensor([4, 4]), features[:5]).isnan().any()  # too few


def test_a_model_that_does_more_with_images_is_refused_and_its_text_part_is_not() -> None:
    model = gemma3()
    with pytest.raises(UsageError, match=r"answers to images differ(?s:.*)Leave `images` out"):
        spec(model, cache_length=64, prompt=16, batch=2, images=PIXELS)
    assert list(spec(model, cache_length=64, prompt=16, batch=2).entries) == ["prefill", "decode"]


def test_what_the_parts_of_a_configuration_choose_stays() -> None:
    model = llava()
    model.config.vision_config._attn_implementation = "eager"
    spec(model, cache_length=16, prompt=8, batch=1)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "sdpa", "eager"]
