"""Models that call kernels of vLLM and SGLang, which serve language models on GPUs.

Each function makes one model. Weights that a library wants in a layout of its own are put into it on the GPU, where
there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from exportkit import ExportSpec
from tools.libraries.support import Arguments, draw_rows, fake, load, spec_of

VLLM = "vllm/_C_stable_libtorch.abi3.so"
VLLM_MOE = "vllm/_moe_C_stable_libtorch.abi3.so"
VLLM_KDA = "vllm/_flashkda_C.abi3.so"
VLLM_FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
VLLM_MLA = "vllm/_flashmla_C.abi3.so"
SGLANG = "sgl_kernel/sm90/common_ops.abi3.so"
SGLANG_MLA = "sgl_kernel/flashmla_ops.abi3.so"

_HALF = torch.bfloat16
_FLOAT8 = torch.float8_e4m3fn
_UINT4_LESS_8 = 2**50 + (8 << 17) + (4 << 8)  # vLLM's number for integers of 4 bits that mean their value less 8


def _to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in float8, and what they are to be multiplied by."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(_FLOAT8), scale


class _Block(nn.Module):
    """A decoder block: norms, rotation and activation are a library's, the attention and the products torch's."""

    width, heads = 1024, 16

    def __init__(self, operators: Any, names: tuple[str, str], **options: bool) -> None:
        super().__init__()
        self.norm, self.add_norm = (partial(getattr(operators, name), **options) for name in names)
        self.rotate, self.activate = operators.rotary_embedding, operators.silu_and_mul
        self.qkv, self.o = (nn.Linear(self.width, n * self.width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(self.width, 8 * self.width, False), nn.Linear(4 * self.width, self.width, False)
        self.scales = nn.Parameter(1 + 0.1 * torch.randn(2, self.width))
        size = self.width // self.heads
        angles = torch.outer(torch.arange(4096.0), 10000 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], -1))
        self.to(_HALF)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        n, normed = x.shape[0], torch.empty_like(x)
        self.norm(normed, x, self.scales[0], 1e-6)
        q, k, v = (part.contiguous() for part in self.qkv(normed).split(self.width, -1))
        self.rotate(positions, q, k, self.width // self.heads, self.cos_sin, True)
        q, k, v = (part.reshape(1, n, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h, residual = self.o(seen.transpose(1, 2).reshape(n, self.width)), x.clone()
        self.add_norm(h, residual, self.scales[1], 1e-6)
        active = x.new_empty(n, 4 * self.width)
        self.activate(active, self.up(h))
        return self.down(active) + residual


def _draw_block(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    return (*draw_rows(_Block.width, _HALF, sizes, generator)[0], torch.arange(sizes["n"])), {}


_BLOCK_SHAPES = {"x": {0: "n[1:4096]"}, "positions": {0: "n"}}


def vllm_block() -> ExportSpec:
    """A decoder block of vLLM."""
    load(VLLM, "_C::rms_norm")
    return spec_of(
        partial(_Block, torch.ops._C, ("rms_norm", "fused_add_rms_norm")), _draw_block, {"n": 7}, _BLOCK_SHAPES
    )


def sglang_block() -> ExportSpec:
    """A decoder block of SGLang."""
    load(SGLANG, "sgl_kernel::rmsnorm")
    model = partial(_Block, torch.ops.sgl_kernel, ("rmsnorm", "fused_add_rmsnorm"), enable_pdl=False)
    return spec_of(model, _draw_block, {"n": 7}, _BLOCK_SHAPES)


class _Float8(nn.Module):
    """A linear layer in float8. The library quantises each row, and multiplies."""

    weight: Tensor
    scale: Tensor

    def __init__(self, multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], quantise: Any) -> None:
        super().__init__()
        weight, scale = _to_float8(torch.randn(2048, 1024) / 32)
        self.multiply, self.quantise = multiply, quantise
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = torch.empty_like(x, dtype=_FLOAT8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
        self.quantise(rows, x, scale)
        return self.multiply(rows, self.weight.t(), scale, self.scale)


def _vllm_multiply(x: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1], dtype=_HALF)
    torch.ops._C.cutlass_scaled_mm(out, x, weight, x_scale, scale, None)
    return out


def _vllm_quantise(rows: Tensor, x: Tensor, scale: Tensor) -> None:
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(rows, x, scale, None)


def vllm_float8() -> ExportSpec:
    """A linear layer of vLLM in float8, with CUTLASS's product."""
    load(VLLM, "_C::cutlass_scaled_mm")
    draw = partial(draw_rows, 1024, _HALF)
    return spec_of(partial(_Float8, _vllm_multiply, _vllm_quantise), draw, {"n": 5}, {"x": {0: "n[1:4096]"}})


def _sglang_multiply(x: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
    return torch.ops.sgl_kernel.fp8_scaled_mm(x, weight, x_scale, scale, _HALF, None)


def _sglang_quantise(rows: Tensor, x: Tensor, scale: Tensor) -> None:
    torch.ops.sgl_kernel.sgl_per_token_quant_fp8(x, rows, scale)


def _fake_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


class _Paged(nn.Module):
    """FlashAttention 3 from one query of each sequence to a cache of 64 pages that are the model's own."""

    keys: Tensor
    values: Tensor
    heads, kv_heads, width, page, pages = 8, 2, 128, 16, 8

    def __init__(self) -> None:
        super().__init__()
        shape = (8 * self.pages, self.page, self.kv_heads, self.width)
        self.register_buffer("keys", torch.randn(shape, dtype=_HALF))
        self.register_buffer("values", torch.randn(shape, dtype=_HALF))

    def forward(self, q: Tensor, table: Tensor, used: Tensor) -> Tensor:
        begins = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        # fmt: off
        return torch.ops._vllm_fa3_C.fwd(
            q.clone(), self.keys, self.values, None, None, None, None, begins, None, None, None, used, 1,
            self.pages * self.page, table, None, None, None, None, None, None, None, None, self.width**-0.5, True,
            -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
        )[0]
        # fmt: on


def _draw_paged(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    n, pages = sizes["n"], _Paged.pages
    q = torch.randn(n, _Paged.heads, _Paged.width, generator=generator).to(_HALF)
    table = torch.randint(0, 8 * pages, (n, pages), generator=generator, dtype=torch.int32)
    used = torch.randint(1, pages * _Paged.page + 1, (n,), generator=generator, dtype=torch.int32)
    return (q, table, used), {}


def _fake_paged(q: Tensor, *_: Any) -> list[Tensor]:
    nothing = q.new_empty(0, dtype=torch.float32)  # partial answers, of which one split has none
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return [torch.empty_like(q, memory_format=torch.contiguous_format), sums, nothing, nothing.clone()]


def vllm_paged_attention() -> ExportSpec:
    """FlashAttention 3 of vLLM, over a paged cache."""
    load(VLLM_FA3, "_vllm_fa3_C::fwd")
    fake("_vllm_fa3_C::fwd", _fake_paged)
    return spec_of(_Paged, _draw_paged, {"n": 3}, {name: {0: "n[1:32]"} for name in ("q", "table", "used")})


def sglang_float8() -> ExportSpec:
    """A linear layer of SGLang in float8, whose product has no fake kernel."""
    load(SGLANG, "sgl_kernel::fp8_scaled_mm")
    fake("sgl_kernel::fp8_scaled_mm", _fake_product)
    draw = partial(draw_rows, 1024, _HALF)
    return spec_of(partial(_Float8, _sglang_multiply, _sglang_quantise), draw, {"n": 5}, {"x": {0: "n[1:4096]"}})


class _Int4(nn.Module):
    """A linear layer with weights of 4 bits in groups of 128: vLLM's Machete."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int32).t()
        if torch.cuda.is_available():
            prepack = torch.ops._C.machete_prepack_B
            weight = prepack(weight.cuda(), _HALF, _UINT4_LESS_8, _HALF).cpu()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", (torch.rand(inputs // 128, outputs) / 64).to(_HALF))

    def forward(self, x: Tensor) -> Tensor:
        multiply = torch.ops._C.machete_mm
        return multiply(x, self.weight, _UINT4_LESS_8, None, self.scales, None, 128, None, None, None)


def _fake_machete(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def vllm_int4() -> ExportSpec:
    """A linear layer of vLLM with weights of 4 bits."""
    load(VLLM, "_C::machete_mm")
    fake("_C::machete_mm", _fake_machete)
    return spec_of(partial(_Int4, 1024, 2048), partial(draw_rows, 1024, _HALF), {"n": 5}, {"x": {0: "n[1:512]"}})


class _Experts(nn.Module):
    """A mixture of 8 experts: vLLM chooses 4 of them for each row, and adds up what they answer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(256, 8, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(8, *shape) / 16) for shape in ((256, 64), (64, 256)))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[0], 4
        weights, chosen, places = (x.new_empty(shape, dtype=dtype) for dtype in (torch.float32, *[torch.int32] * 2))
        torch.ops._moe_C.topk_softmax(weights, chosen, places, self.gate(x), True, None, None)
        chosen = chosen.clamp(0, 7)  # whatever a row with NaN chooses
        hidden = torch.einsum("nd,nkdh->nkh", x, self.up[chosen]).relu()
        answers, out = torch.einsum("nkh,nkhd->nkd", hidden, self.down[chosen]), torch.empty_like(x)
        torch.ops._moe_C.moe_sum((answers * weights[..., None]).contiguous(), out, None, None)
        return out


def vllm_experts() -> ExportSpec:
    """A mixture of experts of vLLM."""
    load(VLLM_MOE, "_moe_C::topk_softmax")
    return spec_of(_Experts, partial(draw_rows, 256, torch.float32), {"n": 5}, {"x": {0: "n[1:256]"}})


class _DeltaAttention(nn.Module):
    """Linear attention over several sequences in one tensor: FlashKDA, which writes the answer and the last states."""

    heads, size, tokens, sequences = 2, 128, 512, 8

    def __init__(self) -> None:
        super().__init__()
        width = self.heads * self.size
        self.projections = nn.ModuleList(nn.Linear(256, each, bias=False) for each in (*[width] * 4, self.heads))
        self.to(_HALF)
        self.decay, self.bias = nn.Parameter(torch.rand(self.heads)), nn.Parameter(torch.rand(self.heads, self.size))
        space = torch.ops._flashkda_C.get_workspace_size
        self.workspace: int = space(self.tokens, self.heads, self.sequences)

    def forward(self, x: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, gate, beta = (each(x) for each in self.projections)
        q, k, v, gate = (part.reshape(1, -1, self.heads, self.size) for part in (q, k, v, gate))
        states = x.new_zeros(begins.shape[0] - 1, self.heads, self.size, self.size, dtype=torch.float32)
        last, out = torch.empty_like(states), torch.empty_like(q)
        space = x.new_empty(self.workspace, dtype=torch.uint8)
        fixed = q, k, v, gate, beta[None], self.size**-0.5, out, space, self.decay, self.bias, -5.0
        torch.ops._flashkda_C.fwd(*fixed, states, last, begins)
        return out[0].flatten(1), last


def _draw_sequences(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    n, p = sizes["n"], sizes["p"]
    inner = (torch.randperm(n - 1, generator=generator)[: p - 1] + 1).sort().values
    return (
        *draw_rows(256, _HALF, sizes, generator)[0],
        torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)]),
    ), {}


def vllm_delta_attention() -> ExportSpec:
    """FlashKDA, in vLLM's wheel."""
    load(VLLM_KDA, "_flashkda_C::fwd")
    return spec_of(
        _DeltaAttention, _draw_sequences, {"n": 70, "p": 3}, {"x": {0: "n[8:255]"}, "begins": {0: "p+1[1:8]"}}
    )


class _SparseAttention(nn.Module):
    """DeepSeek's attention of each token to 128 chosen ones, of one latent head: FlashMLA."""

    heads, chosen, values = 64, 128, 512

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = (nn.Linear(128, n * 576, bias=False) for n in (self.heads, 1))
        self.o = nn.Linear(self.heads * self.values, 128, bias=False)
        self.to(_HALF)

    def forward(self, x: Tensor, context: Tensor, chosen: Tensor) -> Tensor:
        q, kv = self.q(x).view(-1, self.heads, 576), self.kv(context)[:, None]
        attend = torch.ops._flashmla_C.sparse_prefill_fwd
        out = attend(q, kv, chosen[:, None], 576**-0.5, self.values, None, None, None)[0]
        return self.o(out.flatten(1))


def _fake_sparse_attention(q: Tensor, kv: Tensor, chosen: Tensor, scale: float, values: int, *_: Any) -> list[Tensor]:
    numbers = [q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2)]
    return [q.new_empty(*q.shape[:2], values), *numbers]


def _draw_sparse_attention(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    x, context = (torch.randn(sizes[name], 128, generator=generator).to(_HALF) for name in ("n", "m"))
    shape = sizes["n"], _SparseAttention.chosen
    return (x, context, torch.randint(0, sizes["m"], shape, generator=generator, dtype=torch.int32)), {}


def vllm_sparse_attention() -> ExportSpec:
    """FlashMLA's sparse attention, in vLLM's wheel."""
    load(VLLM_MLA, "_flashmla_C::sparse_prefill_fwd")
    fake("_flashmla_C::sparse_prefill_fwd", _fake_sparse_attention)
    shapes = {"x": {0: "n[1:64]"}, "context": {0: "m[1:512]"}, "chosen": {0: "n"}}
    return spec_of(_SparseAttention, _draw_sparse_attention, {"n": 3, "m": 50}, shapes)


class _LatentDecoding(nn.Module):
    """One token of each sequence looks at a paged cache of one latent head: FlashMLA, as SGLang has it."""

    heads, pages, blocks = 16, 64, 4

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(128, self.heads * 576, bias=False, dtype=_HALF)
        self.register_buffer("cache", torch.randn(self.pages, 64, 1, 576).to(_HALF))

    def forward(self, x: Tensor, table: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x).view(-1, 1, self.heads, 576)
        plan, splits = torch.ops.sgl_kernel.get_mla_decoding_metadata(used, self.heads, 1, None, False, None)
        attend = torch.ops.sgl_kernel.fwd_kvcache_mla
        out, weight = attend(q, self.cache, 512, used, table, 576**-0.5, True, plan, splits, False, None)
        return out, weight


def _fake_plan(used: Tensor, *_: Any) -> list[Tensor]:
    parts = torch.library.get_ctx().new_dynamic_size(min=1)  # how many a GPU takes at once
    return [used.new_empty(parts, 8), used.new_empty(used.shape[0] + 1)]


def _fake_decoding(q: Tensor, cache: Tensor, values: int, *_: Any) -> list[Tensor]:
    batch, tokens, heads, _size = q.shape
    return [q.new_empty(batch, tokens, heads, values), q.new_empty(batch, heads, tokens, dtype=torch.float32)]


def _draw_decoding(sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    pages, blocks, n = _LatentDecoding.pages, _LatentDecoding.blocks, sizes["n"]
    table = torch.randint(0, pages, (n, blocks), generator=generator, dtype=torch.int32)
    used = torch.randint(1, 64 * blocks + 1, (n,), generator=generator, dtype=torch.int32)
    return (*draw_rows(128, _HALF, sizes, generator)[0], table, used), {}


def sglang_latent_decoding() -> ExportSpec:
    """FlashMLA's decoding, in SGLang's wheel."""
    load(SGLANG_MLA, "sgl_kernel::fwd_kvcache_mla")
    fake("sgl_kernel::get_mla_decoding_metadata", _fake_plan)
    fake("sgl_kernel::fwd_kvcache_mla", _fake_decoding)
    shapes = {"x": {0: "n[1:32]"}, "table": {0: "n"}, "used": {0: "n"}}
    return spec_of(_LatentDecoding, _draw_decoding, {"n": 3}, shapes)
