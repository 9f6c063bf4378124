"""A language model of transformers as a package: `exportkit export llm.py:spec -o llm_aoti.pt2`.

    exportkit export llm.py:spec --model-kwargs '{"path": "folder"}' -o llm_aoti.pt2     # one of yours, or of the Hub

Without a path it is a small Llama with random weights, whose tokens are bytes.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import exportkit.transformers
from exportkit import ExportSpec


def small() -> PreTrainedModel:
    """Returns a small Llama. What it writes means nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # so that its texts are not one token again and again
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def spec(
    path: str | None = None, cache_length: int = 512, prompt: int = 64, batch: int = 8, dtype: str = "float32"
) -> ExportSpec:
    """Says how to export a model.

    Args:
        path: What AutoModelForCausalLM.from_pretrained takes. None for the small one.
        cache_length: How many tokens, prompt and answer, a row of a session can have.
        prompt: How many tokens one call can add.
        batch: How many rows a session can have.
        dtype: Of the weights.
    """
    model = small() if path is None else AutoModelForCausalLM.from_pretrained(path)
    model = model.to(getattr(torch, dtype)).eval()
    return exportkit.transformers.spec(model, cache_length=cache_length, prompt=prompt, batch=batch)
