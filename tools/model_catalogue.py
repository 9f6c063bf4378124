"""Models of many kinds with small random weights, for `python -m tools.models_table`.

Each function marked with `model` returns an ExportSpec. The libraries that define the models are imported in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec

Maker = Callable[[], ExportSpec]


@dataclass(frozen=True)
class Model:
    """An entry of the catalogue.

    Attributes:
        source: Names its function on the command line: `tools.model_catalogue:bert`.
        title: Its name in the table.
        kind: What kind of model it is.
        needs: The modules that it imports.
    """

    source: str
    title: str
    kind: str
    needs: tuple[str, ...]


CATALOGUE: dict[str, Model] = {}


def model(title: str, kind: str, *needs: str) -> Callable[[Maker], Maker]:
    """Adds a function to the catalogue."""

    def add(maker: Maker) -> Maker:
        CATALOGUE[maker.__name__] = Model(f"{maker.__module__}:{maker.__name__}", title, kind, needs)
        return maker

    return add


# --- inputs -----------------------------------------------------------------------------------------------------------

VOCABULARY = 128
TOKENS = {0: "batch[1:8]", 1: "sequence[2:64]"}
IMAGES = {0: "batch[1:8]"}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    """Returns token ids."""
    return torch.randint(3, VOCABULARY, (batch, length))


def image(size: int, batch: int = 2, channels: int = 3) -> Tensor:
    """Returns images."""
    return torch.rand(batch, channels, size, size)


def hugging_face(class_name: str, config: str, **settings: Any) -> Any:
    """Returns a model of transformers with random weights."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, class_name)(getattr(transformers, config)(**settings))


def batched(module: Any, sizes: Mapping[str, dict[int, str]] = {}, /, **inputs: Any) -> ExportSpec:
    """Returns a model whose tensors have the batch first, and further dimensions that vary."""
    tensors = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    shapes = {name: {0: "batch[1:8]", **sizes.get(name, {})} for name in tensors}
    return ExportSpec(model=module, example_kwargs=inputs, dynamic_shapes=shapes)


def text_encoder(class_name: str, config: str, **settings: Any) -> ExportSpec:
    """Returns a model of token ids and a mask, both of any batch and length."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    return batched(hugging_face(class_name, config, **{**TEXT, **settings}), dict.fromkeys(inputs, TOKENS), **inputs)


def decoder(class_name: str, config: str, **settings: Any) -> ExportSpec:
    """Returns a language model that reads a prompt: token ids and a mask, without a cache."""
    spec = text_encoder(class_name, config, **{**SPECIAL, "num_key_value_heads": 2, **settings})
    return ExportSpec(
        model=spec.model,
        example_inputs=(),
        example_kwargs={**spec.example_kwargs, "use_cache": False},
        dynamic_shapes=spec.dynamic_shapes,
    )


def vision(class_name: str, config: str, size: int, **settings: Any) -> ExportSpec:
    """Returns a model of images of one size, in batches."""
    return batched(hugging_face(class_name, config, **settings), pixel_values=image(size))


# --- transformers: text -----------------------------------------------------------------------------------------------


@model("BERT", "text encoder", "transformers")
def bert() -> ExportSpec:
    return text_encoder("BertModel", "BertConfig")


@model("BERT classifier", "text encoder", "transformers")
def bert_classifier() -> ExportSpec:
    return text_encoder("BertForSequenceClassification", "BertConfig", num_labels=3)


@model("RoBERTa", "text encoder", "transformers")
def roberta() -> ExportSpec:
    return text_encoder("RobertaModel", "RobertaConfig", max_position_embeddings=70)


@model("DistilBERT", "text encoder", "transformers")
def distilbert() -> ExportSpec:
    return text_encoder("DistilBertModel", "DistilBertConfig", dim=32, hidden_dim=64, n_heads=4, n_layers=2)


@model("DeBERTa v2", "text encoder", "transformers")
def deberta() -> ExportSpec:
    return text_encoder("DebertaV2Model", "DebertaV2Config")


@model("ModernBERT", "text encoder", "transformers")
def modernbert() -> ExportSpec:
    return text_encoder("ModernBertModel", "ModernBertConfig", **SPECIAL)


@model("GPT-2", "text decoder", "transformers")
def gpt2() -> ExportSpec:
    return decoder("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_embd=32, n_positions=64)


@model("Llama", "text decoder", "transformers")
def llama() -> ExportSpec:
    return decoder("LlamaForCausalLM", "LlamaConfig")


@model("Mistral, sliding window", "text decoder", "transformers")
def mistral() -> ExportSpec:
    return decoder("MistralForCausalLM", "MistralConfig", sliding_window=16)


@model("Qwen 3", "text decoder", "transformers")
def qwen3() -> ExportSpec:
    return decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=8)


@model("Gemma 2", "text decoder", "transformers")
def gemma2() -> ExportSpec:
    return decoder("Gemma2ForCausalLM", "Gemma2Config", head_dim=8)


@model("Phi", "text decoder", "transformers")
def phi() -> ExportSpec:
    return decoder("PhiForCausalLM", "PhiConfig")


@model("OPT", "text decoder", "transformers")
def opt() -> ExportSpec:
    return decoder("OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=32)


def experts(spec: ExportSpec) -> ExportSpec:
    """Chooses products in batches for the experts. By default transformers calls an operator that is Python only."""
    model: Any = spec.model
    model.set_experts_implementation("batched_mm")
    return spec


@model("Mixtral", "mixture of experts", "transformers")
def mixtral() -> ExportSpec:
    return experts(decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4))


@model("Qwen 3 MoE", "mixture of experts", "transformers")
def qwen3_moe() -> ExportSpec:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return experts(decoder("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=8, **sizes))


@model("Mamba", "state-space model", "transformers")
def mamba() -> ExportSpec:
    spec = decoder("MambaForCausalLM", "MambaConfig", state_size=4)
    return ExportSpec(
        model=spec.model,
        example_inputs=(tokens(),),
        example_kwargs={"use_cache": False},
        dynamic_shapes={"input_ids": {0: "batch[1:8]"}},
    )


class WithCache(torch.nn.Module):
    """Takes and returns the cache of a language model as tensors: the keys and values of each layer."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.model = language_model

    def forward(
        self, input_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Returns the logits, and the cache with the new tokens."""
        cache = importlib.import_module("transformers").DynamicCache(past)
        answer = self.model(input_ids, past_key_values=cache, use_cache=True)
        return answer.logits, [(layer.keys, layer.values) for layer in answer.past_key_values.layers]


def with_cache(spec: ExportSpec, heads: int, size: int, layers: int = 2) -> ExportSpec:
    """Returns the model of a spec with a cache of its own."""
    past = [(torch.randn(2, heads, 5, size), torch.randn(2, heads, 5, size)) for _ in range(layers)]
    places = [f"past.{layer}.{part}" for layer in range(layers) for part in range(2)]
    return ExportSpec(
        model=WithCache(spec.model),
        example_inputs=(tokens(length=3), past),
        dynamic_shapes={
            "input_ids": {0: "batch[1:8]", 1: "new[1:16]"},
            **{place: {0: "batch", 2: "past[1:32]"} for place in places},
        },
    )


@model("GPT-2 with its cache", "text decoder", "transformers")
def gpt2_cache() -> ExportSpec:
    return with_cache(gpt2(), heads=4, size=8)


@model("Llama with its cache", "text decoder", "transformers")
def llama_cache() -> ExportSpec:
    return with_cache(llama(), heads=2, size=8)


@model("T5", "encoder and decoder", "transformers")
def t5() -> ExportSpec:
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return encoder_decoder(hugging_face("T5ForConditionalGeneration", "T5Config", **settings, **SPECIAL))


@model("BART", "encoder and decoder", "transformers")
def bart() -> ExportSpec:
    settings = {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **SIDES}
    return encoder_decoder(hugging_face("BartForConditionalGeneration", "BartConfig", **settings, **SPECIAL))


def encoder_decoder(module: torch.nn.Module) -> ExportSpec:
    """Returns a model of two texts."""
    sizes = {"input_ids": TOKENS, "decoder_input_ids": {1: "decoded[2:64]"}}
    return batched(module, sizes, input_ids=tokens(), decoder_input_ids=tokens(length=5), use_cache=False)


# --- transformers: images, sound, time --------------------------------------------------------------------------------

PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}


@model("ViT", "vision", "transformers")
def vit() -> ExportSpec:
    return vision("ViTModel", "ViTConfig", 32, **PATCHES)


@model("DINOv2", "vision", "transformers")
def dinov2() -> ExportSpec:
    return vision("Dinov2Model", "Dinov2Config", 32, **PATCHES)


@model("BEiT", "vision", "transformers")
def beit() -> ExportSpec:
    return vision("BeitModel", "BeitConfig", 32, **PATCHES)


@model("Swin", "vision", "transformers")
def swin() -> ExportSpec:
    settings = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    return vision("SwinModel", "SwinConfig", 32, window_size=4, **settings)


@model("ResNet", "convolutions", "transformers")
def resnet() -> ExportSpec:
    settings = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    spec = vision("ResNetForImageClassification", "ResNetConfig", 32, num_labels=5, **settings)
    sizes = {"pixel_values": {2: "32*rows[1:4]", 3: "32*columns[1:4]"}}
    return batched(spec.model, sizes, pixel_values=torch.rand(2, 3, 64, 96))


@model("ConvNeXT", "convolutions", "transformers")
def convnext() -> ExportSpec:
    return vision("ConvNextModel", "ConvNextConfig", 32, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1])


@model("MobileNet v2", "convolutions", "transformers")
def mobilenet() -> ExportSpec:
    return vision("MobileNetV2Model", "MobileNetV2Config", 64, depth_multiplier=0.35)


@model("SegFormer", "segmentation", "transformers")
def segformer() -> ExportSpec:
    settings = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
    return vision("SegformerForSemanticSegmentation", "SegformerConfig", 64, decoder_hidden_size=32, **settings)


@model("DPT", "depth", "transformers")
def dpt() -> ExportSpec:
    settings = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
    return vision("DPTForDepthEstimation", "DPTConfig", 32, **{**PATCHES, "num_hidden_layers": 4}, **settings)


@model("DETR", "detection", "transformers")
def detr() -> ExportSpec:
    transformers = importlib.import_module("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
        d_model=32, num_queries=6, **SIDES,
    )  # fmt: skip
    mask = torch.ones(2, 64, 64, dtype=torch.int64)
    return batched(transformers.DetrForObjectDetection(config), pixel_values=image(64), pixel_mask=mask)


@model("YOLOS", "detection", "transformers")
def yolos() -> ExportSpec:
    settings = {**PATCHES, "image_size": [32, 32], "num_detection_tokens": 6}
    return vision("YolosForObjectDetection", "YolosConfig", 32, **settings)


@model("CLIP", "vision and text", "transformers")
def clip() -> ExportSpec:
    module = hugging_face(
        "CLIPModel", "CLIPConfig", text_config={**TEXT, **SPECIAL}, vision_config=PATCHES, projection_dim=16
    )
    return ExportSpec(
        model=module,
        example_inputs=(),
        example_kwargs={"input_ids": tokens(3), "pixel_values": image(32)},
        dynamic_shapes={"input_ids": {0: "texts[1:8]", 1: "sequence[2:64]"}, "pixel_values": {0: "images[1:8]"}},
    )


@model("Whisper encoder and decoder", "audio", "transformers")
def whisper() -> ExportSpec:
    settings = {"d_model": 32, "vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": 50}
    module = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **settings, **SIDES, **SPECIAL)
    inputs = {"input_features": torch.randn(2, 8, 100), "decoder_input_ids": tokens(length=5)}
    return batched(module, {"decoder_input_ids": {1: "decoded[2:64]"}}, **inputs, use_cache=False)


@model("Wav2Vec2", "audio", "transformers")
def wav2vec2() -> ExportSpec:
    settings = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
    module = hugging_face(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", **{**TEXT, **SPECIAL}, **settings, num_conv_pos_embeddings=16
    )
    return batched(module, input_values=torch.randn(2, 500))


@model("Audio Spectrogram Transformer", "audio", "transformers")
def spectrogram() -> ExportSpec:
    settings = {**SMALL, "patch_size": 8, "num_mel_bins": 16, "max_length": 32}
    module = hugging_face("ASTForAudioClassification", "ASTConfig", **settings)
    return batched(module, input_values=torch.randn(2, 32, 16))


@model("PatchTST", "time series", "transformers")
def patch_tst() -> ExportSpec:
    settings = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "d_model": 32, "ffn_dim": 64}
    module = hugging_face(
        "PatchTSTForPrediction", "PatchTSTConfig", num_hidden_layers=2, prediction_length=8, **settings
    )
    return batched(module, past_values=torch.randn(2, 32, 3))


SERIES = {"d_model": 16, "prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1}


def time_series(name: str) -> ExportSpec:
    """Returns a model that reads a past and what is known of a future."""
    module = hugging_face(f"{name}Model", f"{name}Config", **SERIES)
    past = {"past_values": torch.rand(2, 18) + 1, "past_time_features": torch.rand(2, 18, 1)}
    future = {"future_values": torch.rand(2, 4) + 1, "future_time_features": torch.rand(2, 4, 1)}
    return batched(module, **past, past_observed_mask=torch.ones(2, 18), **future, use_cache=False)


@model("Time Series Transformer", "time series", "transformers")
def time_series_transformer() -> ExportSpec:
    return time_series("TimeSeriesTransformer")


@model("Autoformer", "time series", "transformers")
def autoformer() -> ExportSpec:
    return time_series("Autoformer")


@model("TimesFM", "time series", "transformers")
def timesfm() -> ExportSpec:
    settings = {**SMALL, "patch_length": 8, "context_length": 32, "horizon_length": 8, "head_dim": 8}
    module = hugging_face("TimesFmModel", "TimesFmConfig", **settings)
    padding, frequency = torch.zeros(2, 32, dtype=torch.int64), torch.tensor([[0], [1]])
    return batched(module, past_values=torch.randn(2, 32), past_values_padding=padding, freq=frequency)
