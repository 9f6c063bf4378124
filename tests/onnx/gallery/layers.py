"""Modules that are made of layers: attention, images, branches, gradients."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Attention with opset 20; only 23 has the operator (pytorch#149662, pytorch#157130)."""

    inputs = ("q=float32[2,4,5,4]", "k=float32[2,2,6,4]")
    dynamic = ("q:2=target[1:8]", "k:2=source[1:8]")

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        grouped = functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        return grouped, functional.scaled_dot_product_attention(q, q, q, is_causal=True)


class Antialiased(nn.Module):
    """An image made smaller without artefacts."""

    inputs = ("image=float32[2,3,16,16]",)
    dynamic = ("image:0=batch[1:4]",)

    def forward(self, image: Tensor) -> Tensor:
        return functional.interpolate(image, (7, 9), mode="bilinear", antialias=True)


class Resized(nn.Module):
    """Images of any height, made larger."""

    inputs = ("image=float32[2,3,16,16]",)
    dynamic = ("image:2=height[3:40]",)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        nearest = functional.interpolate(image, (7, 21), mode="nearest-exact")
        return nearest, functional.interpolate(image, scale_factor=1.7, mode="bilinear")


class Einsum(nn.Module):
    """Products in Einstein's notation, also a diagonal."""

    inputs = ("x=float32[4,3]", "y=float32[4,5,3]")
    dynamic = ("x:0=batch[1:8]", "y:0=batch")

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.einsum("bi,bji->bj", x, y), torch.einsum("ii->i", x.T @ x), torch.einsum("...i,...j->...ij", x, x)


class EmptyNormalised(nn.Module):
    """Norms of a batch that is empty, because a mask chose nothing."""

    inputs = ("x=float32[4,4,5]",)
    dynamic = ("x:0=batch[1:4]",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = x[x[:, 0, 0] > 9]
        return functional.group_norm(chosen, 2), functional.layer_norm(chosen, (5,))


class Branch(nn.Module):
    """A branch on a value by torch.cond."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class PooledToSize(nn.Module):
    """Pooling to a size that divides some heights only: torch's decomposition is right for those."""

    exit_code = 5
    says = "aten.adaptive_avg_pool2d.default is right for some sizes only"
    inputs = ("image=float32[2,3,16,16]",)
    dynamic = ("image:2=height[3:40]",)

    def forward(self, image: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(image, (3, 5))


class OneToken(nn.Module):
    """One token, whose keys join a cache and are repeated for the heads."""

    inputs = ("x=float32[2,1,16]", "cache=float32[2,2,5,4]")
    dynamic = ("x:0=batch[1:8]", "cache:0=batch", "cache:2=length[1:100]")

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        b, n, _ = x.shape
        query = x.view(b, n, 4, 4).transpose(1, 2)
        cache = torch.cat([cache, query[:, :2]], 2)
        keys = cache[:, :, None].expand(b, 2, 2, cache.shape[2], 4).reshape(b, 4, cache.shape[2], 4)
        mixed = functional.scaled_dot_product_attention(query, keys, keys)
        return mixed.transpose(1, 2).reshape(b, n, 16), cache


class Forces(nn.Module):
    """A gradient through weights."""

    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=atoms[2:8]",)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        return -torch.autograd.grad(self.net(y).sum(), y)[0]
