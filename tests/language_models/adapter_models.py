"""A small language model that takes adapters, and what PEFT makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from exportkit import ExportSpec
from exportkit.transformers import Lora, spec

TARGETS = ("q_proj", "v_proj", "down_proj")
RANK, LENGTH, PROMPT, VOCABULARY = 8, 16, 8, 64


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def adapted() -> ExportSpec:
    return spec(
        llama(), cache_length=LENGTH, prompt=PROMPT, batch=4, adapters=Lora(rank=RANK, target_modules=TARGETS), name="a"
    )


def peft_model(folder: Path, seed: int, **config: Any) -> Any:
    """PEFT's model with a random adapter, which it saves."""
    import peft

    torch.manual_seed(seed)
    model = peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they begin as zeros
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.eval()
