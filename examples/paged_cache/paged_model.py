"""A layer of attention over a paged cache, in two forms.

    exportkit export paged_model.py:spec -o paged_aoti.pt2          # the caches are state
    exportkit export paged_model.py:written -o written_aoti.pt2     # the caller owns them, and the model writes them

Who calls it hands out blocks, as a server does: the model gets slots and block tables.
"""

import torch
from paged_cache import paged_attention, reshape_and_cache

from exportkit import ExportSpec, Method

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 64, 4, 2, 16
BLOCKS, SIZE, COLUMNS = 24, 8, 4  # of the cache; and blocks that a sequence may have


class Attention(torch.nn.Module):
    """The layer without a cache of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q = torch.nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.kv = torch.nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_WIDTH)
        self.out = torch.nn.Linear(HEADS * HEAD_WIDTH, WIDTH)

    def write(self, x, slots, kc, vc):
        """Puts tokens [T, WIDTH] into their slots."""
        k, v = self.kv(x).view(-1, 2, KV_HEADS, HEAD_WIDTH).unbind(1)
        reshape_and_cache(k, v, kc, vc, slots)

    def forward(self, x, slots, block_tables, context_lens, kc, vc):
        """Writes a token of each of B sequences, and attends from it to its context, itself included."""
        self.write(x, slots, kc, vc)
        q = self.q(x).view(-1, HEADS, HEAD_WIDTH)
        read = paged_attention(q, kc, vc, block_tables, context_lens, HEAD_WIDTH**-0.5)
        return {"y": self.out(read.flatten(1))}


class Remembering(torch.nn.Module):
    """The layer with caches as state."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.register_buffer("kc", torch.zeros(BLOCKS, SIZE, KV_HEADS, HEAD_WIDTH))
        self.register_buffer("vc", torch.zeros(BLOCKS, SIZE, KV_HEADS, HEAD_WIDTH))

    def fill(self, x, slots):
        """Puts the tokens of prompts into the cache, and says how many."""
        self.attention.write(x, slots, self.kc, self.vc)
        return {"count": (slots >= 0).sum()}

    def decode(self, x, slots, block_tables, context_lens):
        """Takes the next token of each sequence."""
        return self.attention(x, slots, block_tables, context_lens, self.kc, self.vc)


def _place(tables, sequence, token):
    return int(tables[sequence, token // SIZE]) * SIZE + token % SIZE


def _step(x, tables, lengths):
    """The arguments of a step: the next token of each sequence, whose contexts are one longer then."""
    slots = torch.tensor([_place(tables, b, length) for b, length in enumerate(lengths)], dtype=torch.int64)
    return x, slots, tables, torch.tensor(lengths) + 1


def draw_sequence(sizes, generator):
    """A prompt for each sequence, some padding, then three steps."""
    batch, tokens = sizes["batch"], sizes["tokens"]
    tables = torch.randperm(BLOCKS, generator=generator)[: batch * COLUMNS].view(batch, COLUMNS)
    lengths = [0] * batch
    slots = torch.full((tokens,), -1, dtype=torch.int64)
    for token in range(min(tokens, batch * (COLUMNS * SIZE - 4))):
        slots[token] = _place(tables, token % batch, lengths[token % batch])
        lengths[token % batch] += 1
    calls = [("fill", (torch.randn(tokens, WIDTH, generator=generator), slots), {})]
    for step in range(3):
        x = torch.randn(batch, WIDTH, generator=generator)
        calls.append(("decode", _step(x, tables, [length + step for length in lengths]), {}))
    return calls


def draw_written(sizes, generator):
    """A step over caches with values."""
    batch, blocks = sizes["batch"], sizes["blocks"]
    shape = (blocks, SIZE, KV_HEADS, HEAD_WIDTH)
    kc, vc = (torch.randn(shape, generator=generator) for _ in range(2))
    tables = torch.randperm(blocks, generator=generator)[:batch, None]  # a block for each sequence
    lengths = torch.randint(0, SIZE, (batch,), generator=generator).tolist()
    return (*_step(torch.randn(batch, WIDTH, generator=generator), tables, lengths), kc, vc), {}


def spec():
    """The caches are state, and there are two methods."""
    generator = torch.Generator().manual_seed(0)
    (_, fill, _), (_, decode, _), *_ = draw_sequence({"batch": 3, "tokens": 20}, generator)
    rows = {"x": {0: "batch[1:6]"}, "slots": {0: "batch"}, "block_tables": {0: "batch"}, "context_lens": {0: "batch"}}
    return ExportSpec(
        model=Remembering().eval(),
        name="paged",
        methods={
            "fill": Method(example_inputs=fill, dynamic_shapes={"x": {0: "tokens[1:96]"}, "slots": {0: "tokens"}}),
            "decode": Method(example_inputs=decode, dynamic_shapes=rows),
        },
        state=("kc", "vc"),
        draw_sequence=draw_sequence,
    )


def written():
    """The caches are inputs that the model writes in place."""
    args, _ = draw_written({"batch": 3, "blocks": 7}, torch.Generator().manual_seed(0))
    names = ("x", "slots", "block_tables", "context_lens", "kc", "vc")
    dims = ("batch[1:6]", "batch", "batch", "batch", "blocks[6:64]", "blocks")
    return ExportSpec(
        model=Attention().eval(),
        name="paged_written",
        example_inputs=args,
        dynamic_shapes={name: {0: dim} for name, dim in zip(names, dims)},
        writes=("kc", "vc"),
        draw_inputs=draw_written,
    )
