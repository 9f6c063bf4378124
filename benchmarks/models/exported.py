"""A ResNet-18 and a small Llama, for benchmarks/export_time.py."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from exportkit import ExportSpec


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(narrow, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide)),
        )
        self.short = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        return (self.convolutions(x) + self.short(x)).relu()


def resnet() -> ExportSpec:
    """ResNet-18 (arXiv:1512.03385)."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    return ExportSpec(
        model=nn.Sequential(*stem, *blocks, *head).eval(),
        example_inputs=(torch.randn(2, 3, 224, 224),),
        dynamic_shapes=(batch,),
    )


def llama() -> ExportSpec:
    """Two layers of a Llama with a cache: prefill and decode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from exportkit.transformers import spec

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return spec(LlamaForCausalLM(config).eval(), cache_length=256, prompt=32, name="llama")
