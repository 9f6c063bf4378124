"""Modules of which exportkit translates, or refuses, a part by itself."""

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


class PowerOfSize(nn.Module):
    """A power by a size (pytorch#147606)."""

    exit_code = 5
    says = "torch.onnx fails at aten.pow.Tensor_Scalar"
    inputs = ("x=float32[4,3]",)
    dynamic = ("x:0=rows[1:8]",)

    def forward(self, x: Tensor) -> Tensor:
        return x ** x.shape[0]


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
