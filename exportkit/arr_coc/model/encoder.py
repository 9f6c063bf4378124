"""Encoders compute a feature vector for each patch: a vision transformer here, fixed filters in filters.py.

An encoder is an `nn.Module` with `patch_size`, `dim`, `min_rows` (the fewest patches along a side), `needs_maps` and
`forward(image, maps) -> features [B, N, D]`. The maps may be None if it does not need them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from exportkit.arr_coc.model.linear import LINEARS, LinearForm, SampleLinear, product
from exportkit.arr_coc.model.texture import TextureMaps, cut_patches
from exportkit.arr_coc.ops.bias_relu import bias_relu
from exportkit.arr_coc.ops.fused_layer_norm import fused_layer_norm
from exportkit.arr_coc.ops.softmax import softmax
from exportkit.errors import UsageError

Positions = Literal["sincos", "interpolated"]
POSITIONS: tuple[Positions, ...] = ("sincos", "interpolated")
Activation = Literal["gelu", "relu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "relu")
AttentionForm = Literal["sdpa", "explicit"]
ATTENTIONS: tuple[AttentionForm, ...] = ("sdpa", "explicit")
PATCH_SIZES = (14, 16)

# Statistics of ImageNet, on which published weights were trained, for pixels in [0, 1].
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class VitSize:
    """A transformer's size: feature width, number of blocks, attention heads."""

    dim: int
    depth: int
    heads: int


@dataclass(frozen=True)
class VitForms:
    """How a transformer computes what could be computed in several ways.

    Published weights need the activation "gelu"; "relu" is fused with the bias. See Attention and SampleLinear for the
    others.
    """

    activation: Activation = "gelu"
    attention: AttentionForm = "sdpa"
    linear: LinearForm = "auto"

    def __post_init__(self) -> None:
        """Raises UsageError for a form that does not exist."""
        for name, allowed in (("activation", ACTIVATIONS), ("attention", ATTENTIONS), ("linear", LINEARS)):
            if (given := getattr(self, name)) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")


SIZES = {"tiny": VitSize(192, 12, 3), "small": VitSize(384, 12, 6), "base": VitSize(768, 12, 12)}


class VisionTransformer(nn.Module):
    """A pre-norm vision transformer over images of any height and width that are multiples of the patch size.

    Parameters have the names and layouts of timm's plain ViT and DINOv2 (`patch_embed.proj.weight`, `cls_token`,
    `blocks.0.attn.qkv.weight`, ..., with `layer_scale` also `blocks.0.ls1.gamma`). Such weights load after the
    classification head and the mask token are removed. See Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020).

    Args:
        size: "tiny", "small" or "base".
        patch_size: 14 or 16.
        positions: "sincos" computes positions from the grid. "interpolated" learns a grid of `position_grid` x
            `position_grid` and resizes it to the image's grid.
        position_grid: The side of the learned grid: 224 / patch_size for weights trained at 224 pixels.
        layer_scale: Learn a factor per channel after attention and after the MLP, as DINOv2 does.
        forms: See VitForms.
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    needs_maps = False
    min_rows = 4  # 16 patches; with fewer rows, a matrix library's kernel also depends on the number of products

    def __init__(
        self,
        size: str = "small",
        patch_size: int = 16,
        *,
        positions: Positions = "sincos",
        position_grid: int | None = None,
        layer_scale: bool = False,
        forms: VitForms | None = None,
    ) -> None:
        super().__init__()
        if size not in SIZES:
            raise UsageError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
        if patch_size not in PATCH_SIZES:
            raise UsageError(f"patch_size must be 14 or 16, got {patch_size}")
        if positions not in POSITIONS:
            raise UsageError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
        measures, forms = SIZES[size], forms or VitForms()
        self.patch_size, self.dim, self.positions = patch_size, measures.dim, positions
        self.patch_embed = PatchEmbed(measures.dim, patch_size, forms.linear)
        self.cls_token = nn.Parameter(torch.empty(1, 1, measures.dim))
        if positions == "interpolated":
            self.position_grid = position_grid or 224 // patch_size
            self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.position_grid**2, measures.dim))
        elif position_grid is not None:
            raise UsageError('position_grid needs positions="interpolated"; sincos positions have no grid')
        self.blocks = nn.ModuleList(Block(measures, layer_scale, forms) for _ in range(measures.depth))
        self.norm = LayerNorm(measures.dim, eps=1e-6)
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)
        self._initialise()

    def forward(self, image: Tensor, maps: TextureMaps | None) -> Tensor:
        """Returns features [B, N, D] of `image` [B, 3, H, W] in [0, 1], without the class token."""
        rows, columns = image.shape[2] // self.patch_size, image.shape[3] // self.patch_size
        x = self.patch_embed((image - self.pixel_mean) / self.pixel_std)
        if self.positions == "interpolated":
            first, rest = self.pos_embed[:, :1], self._resized_positions(rows, columns)
            x = torch.cat([(self.cls_token + first).expand(x.shape[0], -1, -1), x + rest], dim=1)
        else:
            x = x + sincos_positions(rows, columns, self.dim, image.device).to(x.dtype)
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, 1:])

    def _resized_positions(self, rows: int, columns: int) -> Tensor:
        side = self.position_grid
        grid = self.pos_embed[:, 1:].reshape(1, side, side, self.dim).permute(0, 3, 1, 2)
        grid = functional.interpolate(grid.float(), size=(rows, columns), mode="bicubic", align_corners=False)
        return grid.flatten(2).transpose(1, 2).to(self.pos_embed.dtype)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        if self.positions == "interpolated":
            nn.init.trunc_normal_(self.pos_embed, std=0.02)


class GivenFeatures(nn.Module):
    """Stands for an encoder outside the model, whose features are an input. See `FromFeatures`."""

    needs_maps = False
    min_rows = 1

    def __init__(self, dim: int, patch_size: int) -> None:
        super().__init__()
        if dim < 1 or patch_size < 1:
            raise UsageError(f"dim and patch_size must be at least 1, got {dim} and {patch_size}")
        self.dim, self.patch_size = dim, patch_size

    def forward(self, image: Tensor, maps: TextureMaps | None) -> Tensor:
        """Raises UsageError."""
        raise UsageError("the model has no encoder: features are an input", hint="Call it through FromFeatures.")


class PatchEmbed(nn.Module):
    """A linear map of each patch. The weight has a convolution's shape [D, 3, P, P], as in published weights."""

    def __init__(self, dim: int, patch_size: int, form: LinearForm) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.form = form
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, N, D]."""
        weight, bias = self.proj.weight, self.proj.bias
        patches = cut_patches(image, self.patch_size).flatten(2).to(weight.dtype)
        return product(patches, weight.flatten(1), bias, self.form, training=self.training)


class Block(nn.Module):
    """Attention and MLP, each applied after a layer norm and added to its input."""

    def __init__(self, size: VitSize, layer_scale: bool, forms: VitForms) -> None:
        super().__init__()
        self.norm1 = LayerNorm(size.dim, eps=1e-6)
        self.attn = Attention(size.dim, size.heads, forms)
        self.ls1 = LayerScale(size.dim) if layer_scale else nn.Identity()
        self.norm2 = LayerNorm(size.dim, eps=1e-6)
        self.mlp = Mlp(size.dim, 4 * size.dim, forms)
        self.ls2 = LayerScale(size.dim) if layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, computed by `fused_layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return fused_layer_norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values.

    With the attention "sdpa", `torch.nn.functional.scaled_dot_product_attention` computes it, which never stores the M
    x M matrix. "explicit" stores it and computes `softmax` of its rows.
    """

    def __init__(self, dim: int, heads: int, forms: VitForms) -> None:
        super().__init__()
        self.heads = heads
        self.form = forms.attention
        self.qkv = SampleLinear(dim, 3 * dim, forms.linear)
        self.proj = SampleLinear(dim, dim, forms.linear)

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        batch, rows, dim = x.shape
        qkv = self.qkv(x).reshape(batch, rows, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.form == "explicit":
            mixed = softmax(q @ k.transpose(2, 3) * (dim // self.heads) ** -0.5) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, rows, dim))


class Mlp(nn.Module):
    """Two linear layers with a GELU or ReLU between."""

    def __init__(self, dim: int, hidden: int, forms: VitForms) -> None:
        super().__init__()
        self.activation = forms.activation
        self.fc1 = SampleLinear(dim, hidden, forms.linear)
        self.fc2 = SampleLinear(hidden, dim, forms.linear)

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, D] -> [B, M, D]."""
        if self.activation == "relu":
            return self.fc2(bias_relu(self.fc1.product(x), self.fc1.bias))
        return self.fc2(functional.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, dim: int, start: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return x * self.gamma


def sincos_positions(rows: int, columns: int, dim: int, device: torch.device) -> Tensor:
    """Returns sine and cosine positions of a grid, float32 [rows * columns, dim], half the channels for y, half for x.

    The wavelengths are from "Attention is all you need", so any grid has positions without training.
    """
    frequencies = torch.exp(torch.arange(dim // 4, device=device) * (-math.log(10_000.0) / (dim // 4)))
    y = torch.arange(rows, device=device).unsqueeze(1) * frequencies
    x = torch.arange(columns, device=device).unsqueeze(1) * frequencies
    y = torch.cat([y.sin(), y.cos()], dim=1).unsqueeze(1).expand(-1, columns, -1)
    x = torch.cat([x.sin(), x.cos()], dim=1).unsqueeze(0).expand(rows, -1, -1)
    return torch.cat([y, x], dim=2).reshape(rows * columns, dim)
