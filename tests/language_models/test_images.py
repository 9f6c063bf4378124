"""A language model with images: its text part, what it makes of images, and prompts in which that replaces tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from exportkit.errors import UsageError
from exportkit.transformers import spec, vision_spec

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
