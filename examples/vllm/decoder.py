"""A Llama of vLLM's kernels: its norms, rotary positions, activation and paged cache, and FlashAttention 3.

    exportkit export decoder.py:spec --op-library _C_stable_libtorch.abi3.so --op-library _vllm_fa3_C.abi3.so -o a.pt2

Both libraries are in vLLM's wheel, which need not be installed: they need torch alone, and a GPU. `spec` is a small
model, `quantised` the same in float8, and `large` has 1.5 thousand million parameters. The weights are random.

A session has pages of its own: `cache.{layer}.k` and `.v`, and how many tokens of each sequence they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exportkit import ExportSpec, Method

PAGE = 16
"""The tokens of a page of the cache."""


@torch.library.register_fake("_vllm_fa3_C::fwd")
def _(q: Tensor, *_args: Any, **_kwargs: Any) -> list[Tensor]:
    """The answer [tokens, heads, head_width], and the logarithms of its sums [heads, tokens].

    The third and fourth are partial answers. One split has none.
    """
    nothing = q.new_empty(0, dtype=torch.float32)
    return [torch.empty_like(q, memory_format=torch.contiguous_format),
            q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), nothing, nothing.clone()]  # fmt: skip


def flash_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    queries: Tensor,
    used: Tensor,
    pages: Tensor,
    longest: int,
    length: int,
) -> Tensor:
    """Attention of q [tokens, heads, head_width] to pages of keys and values; the rest is as in Step and Config."""
    return torch.ops._vllm_fa3_C.fwd(
        q, keys, values, None, None, None, None, begins, None, None, queries, used, longest, length, pages,
        None, None, None, None, None, None, None, None, q.shape[-1] ** -0.5, True, -1, -1, 0.0, True, None, 1,
        None, 0, None, 1, 0, None,
    )[0]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The sizes of a model. The defaults are a small one."""

    layers: int = 2
    width: int = 256
    hidden: int = 512
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    length: int = 64  # of the cache: a number of pages
    theta: float = 500_000.0
    eps: float = 1e-5
    float8: bool = False  # the linear layers

    @property
    def head_width(self) -> int:
        """The size of a query."""
        return self.width // self.heads


LARGE = Config(layers=16, width=2048, hidden=8192, heads=32, kv_heads=8, vocabulary=128_256, length=4096)


class Step(NamedTuple):
    """Where the tokens of a call are.

    Attributes:
        positions: Of each token in its sequence, [tokens], int64.
        slots: Of each token in the pages, [tokens], int64; -1 is not kept.
        begins: Where the queries of each sequence begin among the tokens, [batch + 1], int32.
        queries: How many each sequence has, [batch], int32.
        used: How many keys each sequence has then, [batch], int32.
        pages: Of each sequence, [batch, length / PAGE], int32.
        longest: The most queries that a sequence may have. It is fixed at export: the kernel takes an `int`.
    """

    positions: Tensor
    slots: Tensor
    begins: Tensor
    queries: Tensor
    used: Tensor
    pages: Tensor
    longest: int


class Linear8(nn.Module):
    """A linear layer in float8: a scale for each row of the weight, and one for each token."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Takes [tokens, in], returns [tokens, out]."""
        narrow = torch.empty(x.shape, dtype=self.weight.dtype, device=x.device)
        scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(narrow, x, scale, None)
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        torch.ops._C.cutlass_scaled_mm(out, narrow, self.weight.t(), scale, self.scale, None)
        return out


class Cache(nn.Module):
    """The keys and values of one layer, [batch, length, kv_heads, head_width]."""

    def __init__(self, config: Config, batch: int) -> None:
        super().__init__()
        shape = (batch, config.length, config.kv_heads, config.head_width)
        self.register_buffer("k", torch.zeros(shape))
        self.register_buffer("v", torch.zeros(shape))


class Layer(nn.Module):
    """Attention and SwiGLU, each after a norm that adds what came before it to the residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.before_attention = nn.Parameter(torch.ones(config.width))
        self.before_mlp = nn.Parameter(torch.ones(config.width))
        both = config.heads + 2 * config.kv_heads
        self.qkv = nn.Linear(config.width, both * config.head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        self.register_buffer("one", torch.ones(1), persistent=False)  # the scale of a cache that has none

    def forward(self, x: Tensor, residual: Tensor, step: Step, turns: Tensor, cache: Cache) -> Tensor:
        """Takes and returns [tokens, width]; writes the residual and the cache."""
        torch.ops._C.fused_add_rms_norm(x, residual, self.before_attention, self.config.eps)
        x = self.attend(x, step, turns, cache)
        torch.ops._C.fused_add_rms_norm(x, residual, self.before_mlp, self.config.eps)
        active = x.new_empty(x.shape[0], self.config.hidden)
        torch.ops._C.silu_and_mul(active, self.gate_up(x))
        return self.down(active)

    def attend(self, x: Tensor, step: Step, turns: Tensor, cache: Cache) -> Tensor:
        """Writes x's keys and values into the cache, then attends to all that it holds."""
        config = self.config
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_width
        q, k, v = self.qkv(x).split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        torch.ops._C.rotary_embedding(step.positions, q, k, width, turns, True)
        keys, values = (each.view(-1, PAGE, kv_heads, width) for each in (cache.k, cache.v))
        torch.ops._C_cache_ops.reshape_and_cache_flash(
            k.view(-1, kv_heads, width),
            v.view(-1, kv_heads, width),
            keys,
            values,
            step.slots,
            "auto",
            self.one,
            self.one,
        )
        q = q.view(-1, heads, width)
        out = flash_attention(
            q, keys, values, step.begins, step.queries, step.used, step.pages, step.longest, config.length
        )
        return self.out(out.view(-1, config.width))


class Llama(nn.Module):
    """The model with its cache.

    Args:
        config: Its sizes.
        batch: How many sequences the module itself takes.
    """

    def __init__(self, config: Config, batch: int = 1) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.cache = nn.ModuleList(Cache(config, batch) for _ in range(config.layers))
        self.register_buffer("used", torch.zeros(batch, dtype=torch.int32))
        half = torch.arange(0, config.head_width, 2) / config.head_width
        angles = torch.outer(torch.arange(config.length), config.theta**-half)
        self.register_buffer("turns", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Takes the next tokens of each sequence.

        Args:
            tokens: [batch, n], int64.
            lengths: How many of them are the sequence's, from the left: 1 to n, [batch], int64.

        Returns:
            The logits after the last one, [batch, vocabulary], float32.
        """
        batch, count = tokens.shape
        x = self.taken(tokens.reshape(-1), self.step(lengths, count, self.config.length)).view(batch, count, -1)
        last = (lengths - 1)[:, None, None].expand(-1, 1, x.shape[-1])
        return self.head(x.gather(1, last)[:, 0]).float()

    def decode(self, token: Tensor) -> Tensor:
        """Takes the next token of each sequence [batch, 1]; returns the logits after it [batch, vocabulary]."""
        return self.head(self.taken(token[:, 0], self.step(torch.ones_like(self.used), 1, 1))).float()

    def step(self, lengths: Tensor, count: int, longest: int) -> Step:
        """Finds the places of the next tokens: [batch] `lengths` of each sequence, which has room for `count`."""
        batch, device = self.used.shape[0], self.used.device
        in_call = torch.arange(count, device=device)
        # Padding has the last token's position, so that it needs no page.
        positions = self.used[:, None] + torch.minimum(in_call, lengths[:, None] - 1)  # [batch, count]
        pages = torch.arange(batch * (self.config.length // PAGE), device=device, dtype=torch.int32).view(batch, -1)
        slots = pages.gather(1, positions // PAGE) * PAGE + positions % PAGE  # gather refuses a token without a page
        slots = torch.where(in_call < lengths[:, None], slots, -1)
        begins = torch.arange(batch + 1, device=device, dtype=torch.int32) * count
        queries = lengths.int()
        # vLLM's kernels check nothing, and run before the call is refused: they get what is in range.
        used = (self.used + queries).clamp(0, self.config.length)
        positions = positions.clamp(0, self.config.length - 1)
        return Step(positions.view(-1), slots.view(-1), begins, queries, used, pages, longest)

    def taken(self, tokens: Tensor, step: Step) -> Tensor:
        """Runs the layers over tokens [tokens], and writes the cache. Returns the hidden states [tokens, width]."""
        x = self.embedding(tokens)
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, self.cache):
            x = layer(x, residual, step, self.turns, cache)
        self.used.copy_(step.used)
        torch.ops._C.fused_add_rms_norm(x, residual, self.norm, self.config.eps)
        return x


def make(config: Config, batch: int = 1, device: str = "cpu") -> Llama:
    """Returns a model with random weights, in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config, batch)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    model = model.to(torch.bfloat16).eval()
    for layer in model.layers:
        layer.one = torch.ones(1, device=device)  # float32
        for name, linear in list(layer.named_children()) if config.float8 else ():
            setattr(layer, name, Linear8(linear.weight.detach()))
    return model


def _draw(config: Config, sizes: Mapping[str, int], generator: torch.Generator) -> list[Any]:
    """A prompt of each sequence, and three more tokens."""
    batch, count = sizes["batch"], sizes["count"]

    def tokens(*shape: int) -> Tensor:
        return torch.randint(0, config.vocabulary, shape, generator=generator)

    lengths = torch.randint(1, count + 1, (batch,), generator=generator)
    return [
        ("prefill", (tokens(batch, count), lengths), {}),
        *(("decode", (tokens(batch, 1),), {}) for _ in range(3)),
    ]


def _spec(config: Config) -> ExportSpec:
    """Sessions of 1 to 8 sequences, and prompts that fill half of the cache."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (_, prompt, _), (_, token, _), *_ = _draw(config, {"batch": 2, "count": 7}, torch.Generator().manual_seed(0))
    batch = {0: "batch[1:8]"}
    return ExportSpec(
        model=make(config, batch=2, device=device),
        name="vllm_llama",
        methods={
            "prefill": Method(
                example_inputs=prompt,
                dynamic_shapes={"tokens": {**batch, 1: f"count[2:{config.length // 2}]"}, "lengths": batch},
            ),
            "decode": Method(example_inputs=token, dynamic_shapes={"token": batch}),
        },
        state={"cache.*": "batch", "used": "batch"},
        draw_sequence=partial(_draw, config),
    )


def spec() -> ExportSpec:
    """A small model."""
    return _spec(Config())


def quantised() -> ExportSpec:
    """The same in float8."""
    return _spec(Config(float8=True))


def large() -> ExportSpec:
    """The large one."""
    return _spec(LARGE)
