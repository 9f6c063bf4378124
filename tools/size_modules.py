"""What the models of tools/size_catalogue.py are put into, and those that no library of ours defines."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu


class LastToken(torch.nn.Module):
    """A language model that answers with the scores of the token after a text."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the scores, [1, 1, vocabulary]."""
        scores: Tensor = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits
        return scores


class Named(torch.nn.Module):
    """A model of one or two inputs of which one output is wanted."""

    def __init__(self, model: torch.nn.Module, output: str, *inputs: str, **options: Any) -> None:
        super().__init__()
        self.model, self.output, self.inputs, self.options = model, output, inputs, options

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        """Returns the output."""
        given = {} if other is None else dict(zip(self.inputs, (input, other)))
        answer = self.model(**given, **self.options) if given else self.model(input, **self.options)
        wanted: Tensor = answer[self.output]
        return wanted


def paged_causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one text by transformers' interface: each token is a sequence over the blocks before it."""
    assert attention_mask is None
    assert query.shape[0] == 1
    length, width = query.shape[2:]
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    tokens = torch.arange(length, device=query.device)
    tables = tokens.expand(length, length).contiguous()
    scale = width**-0.5 if scaling is None else scaling
    read = importlib.import_module("paged_cache").paged_attention(q, k[:, None], v[:, None], tables, tokens + 1, scale)
    return read[None], None


class DiffusionTransformer(torch.nn.Module):
    """The network of DiT: patches of noisy latents, with a step and a label that shift and scale each layer."""

    def __init__(self, width: int, layers: int, heads: int, channels: int = 4, patch: int = 2, side: int = 32) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(channels, width, patch, patch)
        self.places = torch.nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.step = torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.SiLU(), torch.nn.Linear(width, width))
        self.label = torch.nn.Embedding(1001, width)
        self.layers = torch.nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.last = torch.nn.Linear(width, 2 * width)
        self.out = torch.nn.Linear(width, patch * patch * 2 * channels)
        self.patch = patch

    def forward(self, latents: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        """Returns the noise and its variance."""
        images, _, rows, columns = latents.shape
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.places
        rates = torch.exp(-math.log(10_000) / 128 * torch.arange(128, device=latents.device, dtype=torch.float32))
        angles = steps[:, None].float() * rates
        condition = self.step(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype)) + self.label(labels)
        for layer in self.layers:
            x = layer(x, condition)
        shift, scale = self.last(silu(condition))[:, None].chunk(2, 2)
        x = self.out(_normal(x) * (1 + scale) + shift)
        p = self.patch
        x = x.view(images, rows // p, columns // p, p, p, -1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(images, -1, rows, columns)


def _normal(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=1e-6)


class _Layer(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.condition = torch.nn.Linear(width, 6 * width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.condition(silu(condition))[:, None].chunk(6, 2)
        q, k, v = self.qkv(_normal(x) * (1 + b) + a).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + c * self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + f * self.down(torch.nn.functional.gelu(self.up(_normal(x) * (1 + e) + d), approximate="tanh"))
