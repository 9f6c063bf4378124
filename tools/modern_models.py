"""More models of transformers for the catalogue: language models, codecs, detectors, parts of multimodal models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec
from tools.model_catalogue import (
    PATCHES,
    SIDES,
    SMALL,
    SPECIAL,
    TEXT,
    VOCABULARY,
    batched,
    decoder,
    hugging_face,
    image,
    model,
    text_encoder,
    tokens,
    vision,
)  # fmt: skip

STAGES = ["stage1", "stage2", "stage3", "stage4"]


# --- text -------------------------------------------------------------------------------------------------------------


@model("ALBERT", "text encoder", "transformers")
def albert() -> ExportSpec:
    return text_encoder("AlbertModel", "AlbertConfig", embedding_size=16)


@model("ELECTRA", "text encoder", "transformers")
def electra() -> ExportSpec:
    return text_encoder("ElectraForTokenClassification", "ElectraConfig", embedding_size=16)


@model("XLNet", "text encoder", "transformers")
def xlnet() -> ExportSpec:
    settings = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    module = hugging_face("XLNetModel", "XLNetConfig", **settings)
    return batched(module, {"input_ids": {1: "sequence[2:64]"}}, input_ids=tokens(), use_mems=False)


@model("OLMo 2", "text decoder", "transformers")
def olmo2() -> ExportSpec:
    return decoder("Olmo2ForCausalLM", "Olmo2Config")


@model("OLMo 3, sliding window", "text decoder", "transformers")
def olmo3() -> ExportSpec:
    return decoder("Olmo3ForCausalLM", "Olmo3Config", sliding_window=16)


@model("Granite", "text decoder", "transformers")
def granite() -> ExportSpec:
    return decoder("GraniteForCausalLM", "GraniteConfig")


@model("Falcon", "text decoder", "transformers")
def falcon() -> ExportSpec:
    return decoder("FalconForCausalLM", "FalconConfig")


@model("GPT-NeoX", "text decoder", "transformers")
def gpt_neox() -> ExportSpec:
    return decoder("GPTNeoXForCausalLM", "GPTNeoXConfig")


@model("BLOOM", "text decoder", "transformers")
def bloom() -> ExportSpec:
    return decoder("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4)


@model("Cohere", "text decoder", "transformers")
def cohere() -> ExportSpec:
    return decoder("CohereForCausalLM", "CohereConfig")


@model("Gemma 3, text", "text decoder", "transformers")
def gemma3() -> ExportSpec:
    return decoder("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=16)


@model("DeepSeek V3", "mixture of experts", "transformers")
def deepseek_v3() -> ExportSpec:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    settings = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return decoder("DeepseekV3ForCausalLM", "DeepseekV3Config", **experts, **heads, **settings)


@model("gpt-oss", "mixture of experts", "transformers")
def gpt_oss() -> ExportSpec:
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16}
    return decoder("GptOssForCausalLM", "GptOssConfig", **settings)


@model("Mamba 2", "state-space model", "transformers")
def mamba2() -> ExportSpec:
    settings = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}
    return decoder("Mamba2ForCausalLM", "Mamba2Config", **settings)


@model("Falcon-H1", "state-space model", "transformers")
def falcon_h1() -> ExportSpec:
    settings = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
    return decoder("FalconH1ForCausalLM", "FalconH1Config", **settings)


@model("Zamba 2", "state-space model", "transformers")
def zamba2() -> ExportSpec:
    settings = {"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"]}
    return decoder("Zamba2ForCausalLM", "Zamba2Config", num_key_value_heads=4, adapter_rank=8, **settings)


@model("RWKV", "recurrent", "transformers")
def rwkv() -> ExportSpec:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16}
    module = hugging_face("RwkvForCausalLM", "RwkvConfig", **settings)
    return batched(module, input_ids=tokens(), use_cache=False)


@model("Perceiver", "many kinds", "transformers")
def perceiver() -> ExportSpec:
    heads = {"num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    module = hugging_face("PerceiverModel", "PerceiverConfig", d_model=16, d_latents=32, num_latents=8, **heads)
    return batched(module, {"inputs": {1: "length[2:64]"}}, inputs=torch.randn(2, 9, 16))


# --- images -----------------------------------------------------------------------------------------------------------


@model("DINOv3", "vision", "transformers")
def dinov3() -> ExportSpec:
    return vision("DINOv3ViTModel", "DINOv3ViTConfig", 32, **PATCHES)


@model("Swin v2", "vision", "transformers")
def swin_v2() -> ExportSpec:
    settings = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    return vision("Swinv2Model", "Swinv2Config", 32, window_size=4, **settings)


@model("PVT v2", "vision", "transformers")
def pvt_v2() -> ExportSpec:
    settings = {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 4]}
    return vision("PvtV2Model", "PvtV2Config", 64, mlp_ratios=[2] * 4, **settings)


@model("MobileViT", "vision", "transformers")
def mobilevit() -> ExportSpec:
    settings = {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]}
    return vision("MobileViTForImageClassification", "MobileViTConfig", 64, **settings)


@model("ConvNeXt v2", "convolutions", "transformers")
def convnext_v2() -> ExportSpec:
    return vision("ConvNextV2Model", "ConvNextV2Config", 32, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1])


@model("EfficientNet", "convolutions", "transformers")
def efficientnet() -> ExportSpec:
    settings = {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}
    return vision("EfficientNetModel", "EfficientNetConfig", 64, **settings)


@model("RegNet", "convolutions", "transformers")
def regnet() -> ExportSpec:
    settings = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "groups_width": 8}
    spec = vision("RegNetModel", "RegNetConfig", 64, **settings)
    sizes = {"pixel_values": {2: "32*rows[1:4]", 3: "32*columns[1:4]"}}
    return batched(spec.model, sizes, pixel_values=torch.rand(2, 3, 64, 96))


@model("UperNet", "segmentation", "transformers")
def upernet() -> ExportSpec:
    settings = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 24, "auxiliary_channels": 8}
    backbone = {"model_type": "convnext", "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "out_features": STAGES}
    return vision("UperNetForSemanticSegmentation", "UperNetConfig", 64, backbone_config=backbone, **settings)


def small_resnet(model_type: str = "resnet") -> dict[str, Any]:
    """Returns the configuration of a backbone that gives features of three sizes."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4}
    return {"model_type": model_type, **sizes, "layer_type": "basic", "out_features": STAGES[1:]}


@model("Mask2Former", "segmentation", "transformers")
def mask2former() -> ExportSpec:
    swin = {"model_type": "swin", "image_size": 64, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 2, 2, 4]}
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 32}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32}
    return vision(
        "Mask2FormerForUniversalSegmentation", "Mask2FormerConfig", 64, num_queries=5, **sizes, **layers,
        backbone_config={**swin, "window_size": 4, "patch_size": 2, "out_features": STAGES},
    )  # fmt: skip


@model("SAM, image encoder", "segmentation", "transformers")
def sam_vision() -> ExportSpec:
    settings = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8, "mlp_dim": 64}
    return vision("SamVisionModel", "SamVisionConfig", 32, **{**PATCHES, **settings})


@model("Depth Anything", "depth", "transformers")
def depth_anything() -> ExportSpec:
    backbone = {"model_type": "dinov2", **PATCHES, "num_hidden_layers": 4, "out_features": STAGES}
    settings = {"patch_size": 8, "reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16]}
    return vision(
        "DepthAnythingForDepthEstimation", "DepthAnythingConfig", 32, fusion_hidden_size=16, head_hidden_size=8,
        backbone_config={**backbone, "reshape_hidden_states": False, "apply_layernorm": True}, **settings,
    )  # fmt: skip


DETECTOR = {"d_model": 64, "num_queries": 6, **SIDES, "encoder_n_points": 2, "decoder_n_points": 2}


@model("Deformable DETR", "detection", "transformers")
def deformable_detr() -> ExportSpec:
    settings = {**DETECTOR, "backbone_config": small_resnet()}
    module = hugging_face("DeformableDetrForObjectDetection", "DeformableDetrConfig", **settings)
    sizes = {"pixel_values": {2: "32*rows[2:4]", 3: "32*columns[2:4]"}, "pixel_mask": {1: "32*rows", 2: "32*columns"}}
    mask = torch.ones(2, 64, 96, dtype=torch.int64)
    return batched(module, sizes, pixel_values=torch.rand(2, 3, 64, 96), pixel_mask=mask)


@model("RT-DETR", "detection", "transformers")
def rt_detr() -> ExportSpec:
    backbone = small_resnet("rt_detr_resnet")
    sizes = {"d_model": 32, "encoder_hidden_dim": 32, "encoder_in_channels": [16, 32, 32], "encoder_ffn_dim": 64}
    layers = {"decoder_in_channels": [32] * 3, "decoder_ffn_dim": 64, "decoder_layers": 2, "num_queries": 6}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "backbone_config": backbone}
    module = hugging_face("RTDetrForObjectDetection", "RTDetrConfig", **sizes, **layers, **heads)
    return batched(
        module, {"pixel_values": {2: "32*rows[2:4]", 3: "32*columns[2:4]"}}, pixel_values=torch.rand(2, 3, 64, 96)
    )


@model("Grounding DINO", "detection", "transformers")
def grounding_dino() -> ExportSpec:
    text = {"model_type": "bert", **TEXT}
    settings = {**DETECTOR, "backbone_config": small_resnet(), "text_config": text, "max_text_len": 64}
    module = hugging_face("GroundingDinoForObjectDetection", "GroundingDinoConfig", **settings)
    sizes = {"input_ids": {1: "sequence[4:64]"}}
    return batched(module, sizes, pixel_values=image(64), input_ids=tokens())


@model("VideoMAE", "video", "transformers")
def videomae() -> ExportSpec:
    module = hugging_face("VideoMAEForVideoClassification", "VideoMAEConfig", **PATCHES, num_frames=4)
    return batched(module, pixel_values=torch.rand(2, 4, 3, 32, 32))


# --- images and text --------------------------------------------------------------------------------------------------


@model("SigLIP", "vision and text", "transformers")
def siglip() -> ExportSpec:
    text = {**TEXT, **SPECIAL, "projection_size": 32}
    module = hugging_face("SiglipModel", "SiglipConfig", text_config=text, vision_config=PATCHES)
    return ExportSpec(
        model=module,
        example_kwargs={"input_ids": tokens(3), "pixel_values": image(32)},
        dynamic_shapes={"input_ids": {0: "texts[1:8]", 1: "sequence[2:64]"}, "pixel_values": {0: "images[1:8]"}},
    )


@model("SmolVLM, vision part", "vision", "transformers")
def smolvlm_vision() -> ExportSpec:
    return vision("SmolVLMVisionTransformer", "SmolVLMVisionConfig", 32, **PATCHES)


class QwenVision(torch.nn.Module):
    """The vision part of a Qwen-VL model for images of one size, whose grid is a constant."""

    def __init__(self, vision_part: torch.nn.Module, grid: Tensor) -> None:
        super().__init__()
        self.vision_part = vision_part
        self.register_buffer("grid", grid)

    def forward(self, patches: Tensor) -> Tensor:
        """Returns a vector for each group of patches."""
        return self.vision_part(patches, grid_thw=self.grid).pooler_output


@model("Qwen2-VL, vision part", "vision", "transformers")
def qwen2_vl_vision() -> ExportSpec:
    settings = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    whole = hugging_face("Qwen2VLModel", "Qwen2VLConfig", text_config={**TEXT, **SPECIAL}, vision_config=settings)
    return ExportSpec(QwenVision(whole.visual, torch.tensor([[1, 4, 6], [1, 4, 4]])), (torch.randn(40, 96),))


def llava_model() -> Any:
    """Returns a model whose images are 16 tokens."""
    text = {"model_type": "llama", **TEXT, **SPECIAL, "num_key_value_heads": 2}
    vision = {"model_type": "clip_vision_model", **PATCHES}
    parts = {"text_config": text, "vision_config": vision}
    return hugging_face("LlavaForConditionalGeneration", "LlavaConfig", **parts, image_token_index=100)


@model("LLaVA", "vision and text", "transformers")
def llava() -> ExportSpec:
    """Reads an image of 16 tokens, and then text."""

    def prompt(batch: int, length: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        ids = torch.randint(3, 100, (batch, length), generator=generator)
        ids[:, 1:17] = 100
        pixels = torch.rand(batch, 3, 32, 32, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "use_cache": False}

    return ExportSpec(
        model=llava_model(),
        example_kwargs=prompt(2, 24),
        dynamic_shapes={"input_ids": {0: "batch[1:8]", 1: "sequence[18:64]"}, "pixel_values": {0: "batch[1:8]"}},
        draw_inputs=lambda sizes, generator: ((), prompt(sizes["batch"], sizes["sequence"], generator)),
    )


@model("LLaVA, text part on embeddings", "text decoder", "transformers")
def llava_text() -> ExportSpec:
    module, sizes = llava_model().model.language_model, {"inputs_embeds": {1: "sequence[2:64]"}}
    return batched(module, sizes, inputs_embeds=torch.randn(2, 7, 32), use_cache=False)


# --- sound ------------------------------------------------------------------------------------------------------------

SPEECH = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}


@model("HuBERT", "audio", "transformers")
def hubert() -> ExportSpec:
    module = hugging_face("HubertForCTC", "HubertConfig", **TEXT, **SPECIAL, **SPEECH, num_conv_pos_embeddings=16)
    return batched(module, {"input_values": {1: "samples[200:800]"}}, input_values=torch.randn(2, 500))


@model("WavLM", "audio", "transformers")
def wavlm() -> ExportSpec:
    module = hugging_face("WavLMModel", "WavLMConfig", **TEXT, **SPECIAL, **SPEECH, num_conv_pos_embeddings=16)
    return batched(module, {"input_values": {1: "samples[200:800]"}}, input_values=torch.randn(2, 500))


@model("SpeechT5", "audio", "transformers")
def speecht5() -> ExportSpec:
    settings = {**TEXT, **SPECIAL, **SIDES, **SPEECH, "num_conv_pos_embeddings": 16, "max_text_positions": 64}
    module = hugging_face("SpeechT5ForSpeechToText", "SpeechT5Config", **settings)
    sizes = {"input_values": {1: "samples[200:800]"}, "decoder_input_ids": {1: "decoded[2:64]"}}
    inputs = {"input_values": torch.randn(2, 500), "decoder_input_ids": tokens(length=5)}
    return batched(module, sizes, **inputs, use_cache=False)


@model("CLAP", "audio and text", "transformers")
def clap() -> ExportSpec:
    audio = {"spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_embeds_hidden_size": 16, "hidden_size": 32}
    layers = {"depths": [1, 1], "num_attention_heads": [2, 4], "num_hidden_layers": 2}
    parts = {"text_config": {**TEXT, "max_position_embeddings": 70}, "audio_config": {**audio, **layers}}
    module = hugging_face("ClapModel", "ClapConfig", **parts, projection_dim=16)
    return ExportSpec(
        model=module,
        example_kwargs={"input_ids": tokens(3), "input_features": torch.randn(2, 1, 256, 16)},
        dynamic_shapes={"input_ids": {0: "texts[1:8]", 1: "sequence[2:64]"}, "input_features": {0: "sounds[1:8]"}},
    )


class Voice(torch.nn.Module):
    """What VITS does after it has drawn its latents: the flow, and the decoder of waves."""

    def __init__(self, voice: Any) -> None:
        super().__init__()
        self.flow, self.decoder = voice.flow, voice.decoder

    def forward(self, latents: Tensor, mask: Tensor) -> Tensor:
        """Returns waves."""
        return self.decoder(self.flow(latents, mask, reverse=True) * mask)


@model("VITS, flow and decoder", "audio", "transformers")
def vits() -> ExportSpec:
    flow = {"hidden_size": 16, "flow_size": 16, "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2}
    waves = {"upsample_initial_channel": 16, "upsample_rates": [4, 2], "upsample_kernel_sizes": [8, 4]}
    sizes = {"latents": {2: "frames[4:64]"}, "mask": {2: "frames[4:64]"}}
    text = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    module = Voice(hugging_face("VitsModel", "VitsConfig", **flow, **waves, **text, spectrogram_bins=9))
    return batched(module, sizes, latents=torch.randn(2, 16, 12), mask=torch.ones(2, 1, 12))


@model("Encodec", "audio codec", "transformers")
def encodec() -> ExportSpec:
    settings = {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "upsampling_ratios": [4, 2]}
    rates = {"sampling_rate": 800, "target_bandwidths": [4.0], "num_lstm_layers": 1}
    module = hugging_face("EncodecModel", "EncodecConfig", **settings, **rates)
    return batched(module, {"input_values": {2: "samples[64:800]"}}, input_values=torch.randn(2, 1, 200))


@model("DAC", "audio codec", "transformers")
def dac() -> ExportSpec:
    sizes = {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "downsampling_ratios": [2, 4]}
    module = hugging_face("DacModel", "DacConfig", **sizes, n_codebooks=2, codebook_size=16, codebook_dim=4)
    return batched(module, {"input_values": {2: "8*frames[8:100]"}}, input_values=torch.randn(2, 1, 200))


@model("Mimi", "audio codec", "transformers")
def mimi() -> ExportSpec:
    codes = {"codebook_size": 16, "codebook_dim": 16, "num_quantizers": 4, "vector_quantization_hidden_dimension": 16}
    sizes = {"num_filters": 4, "upsampling_ratios": [4, 2], "upsample_groups": 32, "head_dim": 8}
    layers = {**SMALL, "num_key_value_heads": 4}
    module = hugging_face("MimiModel", "MimiConfig", **codes, **sizes, **layers)
    return batched(module, {"input_values": {2: "samples[64:800]"}}, input_values=torch.randn(2, 1, 200))
