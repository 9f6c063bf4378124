"""A Llama with methods `prefill` and `decode` over a cache that is written in place.

    exportkit export llama.py:spec -o llama_aoti.pt2        # a small one, for a CPU
    exportkit export llama.py:large -o llama_aoti.pt2       # 1.5 thousand million parameters in bfloat16

The parts are those of the field: RMSNorm, rotary positions, grouped queries, SwiGLU. The weights are random. The cache,
`cache.{layer}.k` and `.v`, and the position are buffers and the state of a session.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from exportkit import ExportSpec, Method


@dataclass(frozen=True)
class Config:
    """The sizes of a model. The defaults are a small one."""

    layers: int = 2
    width: int = 64
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    length: int = 64  # of the cache
    theta: float = 500_000.0
    eps: float = 1e-5

    @property
    def head_width(self) -> int:
        """The size of a query."""
        return self.width // self.heads


LARGE = Config(layers=16, width=2048, hidden=8192, heads=32, kv_heads=8, vocabulary=128_256, length=4096)


class Cache(nn.Module):
    """The keys and values of one layer, [batch, kv_heads, length, head_width]."""

    def __init__(self, config: Config, batch: int) -> None:
        super().__init__()
        shape = (batch, config.kv_heads, config.length, config.head_width)
        self.register_buffer("k", torch.zeros(shape))
        self.register_buffer("v", torch.zeros(shape))


class Place(NamedTuple):
    """Where tokens are: their positions [n], the cosines and sines of these, and a mask [n, length].

    The mask is 0 where a token looks, and -inf elsewhere. Of a mask of bool, attention would make it in each layer.
    """

    positions: Tensor
    turn: tuple[Tensor, Tensor]
    mask: Tensor


class Attention(nn.Module):
    """Grouped queries over a cache."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        both = config.heads + 2 * config.kv_heads
        self.qkv = nn.Linear(config.width, both * config.head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, place: Place, k: Tensor, v: Tensor) -> Tensor:
        """Writes the keys and values of x [batch, n, width] into k and v, and attends to what is there so far."""
        config, (batch, count) = self.config, x.shape[:2]
        positions, turn, mask = place
        heads = self.qkv(x).view(batch, count, -1, config.head_width)
        q, new_k, new_v = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=2)
        k.index_copy_(2, positions, _turned(new_k, *turn).transpose(1, 2))
        v.index_copy_(2, positions, new_v.transpose(1, 2))
        # [batch, heads, n, head_width]; queries share heads of keys and values
        attended = scaled_dot_product_attention(_turned(q, *turn).transpose(1, 2), k, v, mask, enable_gqa=True)
        return self.out(attended.transpose(1, 2).reshape(batch, count, -1))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, by halves, of x [batch, n, heads, head_width]."""
    first, second = _wide(x).chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.width))
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns x over its root mean square, times the weight."""
        return rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Layer(nn.Module):
    """Attention and SwiGLU, each around a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = Norm(config), Norm(config)
        self.attention = Attention(config)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, place: Place, k: Tensor, v: Tensor) -> Tensor:
        """Takes and returns [batch, n, width]; writes k and v."""
        x = x + self.attention(self.before_attention(x), place, k, v)
        y = self.before_mlp(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The model with its cache.

    Args:
        config: Its sizes.
        batch: How many sequences the module itself takes. They have one position.
    """

    def __init__(self, config: Config, batch: int = 1) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.cache = nn.ModuleList(Cache(config, batch) for _ in range(config.layers))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def prefill(self, tokens: Tensor) -> Tensor:
        """Takes the next tokens [batch, n]; returns the logits after the last one [batch, vocabulary], wide."""
        count = tokens.shape[1]
        positions = self.position + torch.arange(count, device=tokens.device)
        logits = self.logits(tokens, positions, [(cache.k, cache.v) for cache in self.cache])
        self.position += count
        return logits

    def decode(self, token: Tensor) -> Tensor:
        """Takes the next token [batch, 1]; returns the logits after it [batch, vocabulary]."""
        return self.prefill(token)

    def logits(self, tokens: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Writes tokens at `positions` into a cache; returns the logits after the last one."""
        half = torch.arange(0, self.config.head_width, 2, device=tokens.device, dtype=torch.float32)
        angles = positions[:, None] * self.config.theta ** -(half / self.config.head_width)
        turn = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embedding(tokens)
        later = torch.arange(self.config.length, device=tokens.device) > positions[:, None]
        mask = torch.zeros_like(later, dtype=x.dtype).masked_fill(later, float("-inf"))
        for layer, (k, v) in zip(self.layers, cache):
            x = layer(x, Place(positions, turn, mask), k, v)
        return _wide(self.head(self.norm(x[:, -1])))


class Passing(nn.Module):
    """The same model as a pure function: the cache goes in and comes out, which copies it."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, position: Tensor, cache: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, object]:
        """Takes a token [batch, 1] and its position [1]; returns the logits and the new cache."""
        new = [(k.clone(), v.clone()) for k, v in cache]
        return self.model.logits(token, position, new), new


def make(config: Config, batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """Returns a model with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config, batch)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return model.to(dtype).eval()


def spec() -> ExportSpec:
    """A small model: a session of 1 to 8 sequences, prompts of 1 to 32 tokens."""
    config = Config()
    tokens = torch.randint(0, config.vocabulary, (2, 7))
    batch = {0: "batch[1:8]"}
    return ExportSpec(
        model=make(config, batch=2),
        name="llama",
        methods={
            "prefill": Method(example_inputs=(tokens,), dynamic_shapes={"tokens": {**batch, 1: "count[2:32]"}}),
            "decode": Method(example_inputs=(tokens[:, :1],), dynamic_shapes={"token": batch}),
        },
        state={"cache.*": "batch", "position": None},
    )


def large() -> ExportSpec:
    """The large model for one sequence, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(0, LARGE.vocabulary, (1, 64), device=device)
    return ExportSpec(
        model=make(LARGE, device=device, dtype=torch.bfloat16),
        name="llama",
        methods={
            "prefill": Method(example_inputs=(tokens,), dynamic_shapes={"tokens": {1: "count[2:2048]"}}),
            "decode": Method(example_inputs=(tokens[:, :1],)),
        },
        state=("cache.*", "position"),
    )
