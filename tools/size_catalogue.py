"""Models of 0.3 to 8 thousand million parameters with random weights in bfloat16, for `python -m tools.sizes_table`.

The weights are made on the GPU where there is one. `small` gives the same architecture in a size for any machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from exportkit import ExportSpec
from tools.size_modules import DiffusionTransformer, LastToken, Named, paged_causal_attention


class Maker(Protocol):
    """Makes a model of the catalogue."""

    __name__: str
    __module__: str

    def __call__(self, small: bool = False) -> ExportSpec:
        """Returns the model, in its real size or a small one."""


@dataclass(frozen=True)
class SizedModel:
    """An entry of the catalogue.

    Attributes:
        source: Names its function on the command line.
        title: Its name in the table.
        kind: What kind of model it is.
        billions: Its parameters in thousand millions, about: large models are begun first.
        library: The module that loads its custom operators, or None.
    """

    source: str
    title: str
    kind: str
    billions: float
    library: str | None


SIZED: dict[str, SizedModel] = {}


def sized(title: str, kind: str, billions: float, library: str | None = None) -> Callable[[Maker], Maker]:
    """Adds a function to the catalogue."""

    def add(maker: Maker) -> Maker:
        SIZED[maker.__name__] = SizedModel(f"{maker.__module__}:{maker.__name__}", title, kind, billions, library)
        return maker

    return add


# --- how they are made ------------------------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 512  # the greatest length of a text


def made(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Returns a model whose weights are drawn where they stay, and in the dtype that they keep."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return build().eval()
    finally:
        torch.set_default_dtype(before)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # such as a table that was drawn before it was tied to another


def hugging_face(class_name: str, config: str, settings: Mapping[str, Any], **others: Any) -> torch.nn.Module:
    """Returns a model of transformers."""
    transformers = importlib.import_module("transformers")
    chosen = getattr(transformers, config)(**settings, **others)
    return made(lambda: getattr(transformers, class_name)(chosen))


def tokens(length: int = 64, vocabulary: int = 250) -> Tensor:
    """Returns token ids."""
    return torch.randint(3, vocabulary, (1, length), device=DEVICE)


def noise(*shape: int) -> Tensor:
    """Returns numbers in the models' dtype."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def language_model(
    class_name: str, config: str, settings: Mapping[str, Any], *, length: int = LENGTH, attention: str | None = None
) -> ExportSpec:
    """Returns a model that reads a text of any length, and answers with the scores of the next token."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    given = {"attn_implementation": attention} if attention else {}
    model = hugging_face(class_name, config, settings, **special, **given)
    return ExportSpec(
        model=LastToken(model),
        example_inputs=(tokens(min(64, length // 2)),),
        dynamic_shapes={"input_ids": {1: f"length[1:{length}]"}},
    )


def llama_like(small: bool, **real: Any) -> dict[str, Any]:
    """Returns settings of a decoder with grouped keys: the real ones, or small ones."""
    if not small:
        return {"max_position_embeddings": 8192, **real}
    kept = {key: value for key, value in real.items() if isinstance(value, (bool, str))}
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return {**sizes, **heads, "max_position_embeddings": 1024, **kept}


# --- texts ------------------------------------------------------------------------------------------------------------


@sized("Llama 3.1 8B", "decoder", 8.0)
def llama_8b(small: bool = False) -> ExportSpec:
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return language_model("LlamaForCausalLM", "LlamaConfig", llama_like(small, **sizes, **heads))


@sized("OLMoE 1B-7B", "mixture of 64 experts", 6.9)
def olmoe(small: bool = False) -> ExportSpec:
    from exportkit.transformers.language_model import run_all_experts

    sizes = {"vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    mixture = {"num_experts": 8, "num_experts_per_tok": 2} if small else {"num_experts": 64, "num_experts_per_tok": 8}
    importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register("all", run_all_experts)
    spec = language_model("OlmoeForCausalLM", "OlmoeConfig", llama_like(small, **sizes, **heads) | mixture, length=256)
    model: Any = spec.model
    model.model.set_experts_implementation("all")
    return spec


@sized("Qwen 3 4B", "decoder", 4.0)
def qwen3_4b(small: bool = False) -> ExportSpec:
    sizes = {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    return language_model("Qwen3ForCausalLM", "Qwen3Config", llama_like(small, **sizes, **heads))


@sized("Gemma 2 2B", "decoder, sliding window", 2.6)
def gemma2_2b(small: bool = False) -> ExportSpec:
    sizes = {"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    return language_model("Gemma2ForCausalLM", "Gemma2Config", llama_like(small, **sizes, **heads))


@sized("Qwen 3 1.7B", "decoder, attention of ours", 1.7, "paged_cache")
def qwen3_paged(small: bool = False) -> ExportSpec:
    sizes = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    return paged("Qwen3ForCausalLM", "Qwen3Config", llama_like(small, **sizes, **heads))


@sized("Llama 3.2 1B", "decoder, attention of ours", 1.2, "paged_cache")
def llama_paged(small: bool = False) -> ExportSpec:
    sizes = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
    return paged("LlamaForCausalLM", "LlamaConfig", llama_like(small, **sizes, **heads))


def paged(class_name: str, config: str, settings: Mapping[str, Any]) -> ExportSpec:
    """Returns a language model whose attention is the operator of examples/paged_cache."""
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register("paged_causal", paged_causal_attention)
    transformers.AttentionMaskInterface.register("paged_causal", lambda *_, **__: None)
    return language_model(class_name, config, settings, attention="paged_causal")


@sized("GPT-2 large", "decoder", 0.8)
def gpt2_large(small: bool = False) -> ExportSpec:
    real = {"n_embd": 1280, "n_layer": 36, "n_head": 20}
    little = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
    return language_model("GPT2LMHeadModel", "GPT2Config", little if small else real)


@sized("Mamba 2 780M", "state-space model", 0.8)
def mamba2(small: bool = False) -> ExportSpec:
    # The function does not depend on how many tokens are computed at once, which takes memory.
    real = {"hidden_size": 1536, "num_hidden_layers": 36, "num_heads": 48, "head_dim": 64, "state_size": 128}
    little = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16}
    texts = {"vocab_size": 256 if small else 50_288, "n_groups": 1, "chunk_size": 32, "tie_word_embeddings": True}
    spec = language_model("Mamba2ForCausalLM", "Mamba2Config", {**(little if small else real), **texts})
    # Its code branches on the number of blocks: the length is fixed.
    return replace(
        spec, example_inputs=(tokens().expand(2, -1).clone(),), dynamic_shapes={"input_ids": {0: "batch[1:4]"}}
    )


@sized("XLM-RoBERTa large", "encoder", 0.6)
def xlm_roberta(small: bool = False) -> ExportSpec:
    real = {"vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    little = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = little if small else real
    inner = {"intermediate_size": 4 * sizes["hidden_size"], "max_position_embeddings": 514}
    model = hugging_face("XLMRobertaModel", "XLMRobertaConfig", {**sizes, **inner})
    return ExportSpec(
        model=Named(model, "last_hidden_state"),
        example_inputs=(tokens(),),
        dynamic_shapes={"input": {1: "length[1:512]"}},
    )


# --- images and sound -------------------------------------------------------------------------------------------------

IMAGES = {0: "images[1:8]"}


@sized("Whisper large v3 turbo", "encoder and decoder of sound", 0.8)
def whisper_turbo(small: bool = False) -> ExportSpec:
    width, encoder, decoder, heads = (64, 2, 1, 4) if small else (1280, 32, 4, 20)
    frames, mels, vocabulary = (64, 16, 256) if small else (3000, 128, 51_866)
    layers = {"encoder_layers": encoder, "decoder_layers": decoder}
    layers |= {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    layers |= {f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")}
    sizes = {"d_model": width, "num_mel_bins": mels, "vocab_size": vocabulary, "max_source_positions": frames // 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    model = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", {**sizes, **layers}, **special)
    return ExportSpec(
        model=Named(model, "logits", "input_features", "decoder_input_ids", use_cache=False),
        example_inputs=(noise(1, mels, frames), tokens(8)),
        dynamic_shapes={"other": {1: "decoded[1:32]"}},
    )


@sized("DiT-XL/2", "diffusion transformer", 0.7)
def dit_xl(small: bool = False) -> ExportSpec:
    sizes = {"width": 64, "layers": 2, "heads": 4} if small else {"width": 1152, "layers": 28, "heads": 16}
    latents = noise(2, 4, 32, 32)
    return ExportSpec(
        model=made(lambda: DiffusionTransformer(**sizes)),
        example_inputs=(latents, torch.tensor([10, 500], device=DEVICE), torch.tensor([3, 700], device=DEVICE)),
        dynamic_shapes={"latents": IMAGES, "steps": {0: "images"}, "labels": {0: "images"}},
    )


@sized("SigLIP So400m", "encoder of images", 0.4)
def siglip(small: bool = False) -> ExportSpec:
    real = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    little = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    side = 28 if small else 224
    model = hugging_face("SiglipVisionModel", "SiglipVisionConfig", little if small else real, image_size=side,
                         patch_size=14)  # fmt: skip
    return ExportSpec(
        model=Named(model, "pooler_output"), example_inputs=(noise(2, 3, side, side),), dynamic_shapes={"input": IMAGES}
    )


@sized("CLIP ViT-L/14", "encoder of images and texts", 0.4)
def clip(small: bool = False) -> ExportSpec:
    width = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    texts = width if small else {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    images = width if small else {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    if not small:
        images |= {"num_attention_heads": 16}
    side = 28 if small else 224
    model = hugging_face(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**texts, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
            "vision_config": {**images, "image_size": side, "patch_size": 14},
            "projection_dim": 64 if small else 768,
        },
    )
    return ExportSpec(
        model=Named(model, "logits_per_image", "input_ids", "pixel_values"),
        example_inputs=(tokens(16), noise(2, 3, side, side)),
        dynamic_shapes={"input": {1: "length[2:77]"}, "other": IMAGES},
    )
