"""Calls of the operators of examples/paged_cache, and their promises."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from paged_cache.paged_attention import paged_attention, paged_attention_reference
from paged_cache.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference

from exportkit.operators.contract import Layout, OpSpec, Refusal, Sample
from exportkit.operators.contract.layout import check


def write_call(tokens, blocks, size, heads, width, *, skipped=0, device="cpu", dtype=torch.float32):
    """Arguments of reshape_and_cache; the last tokens are left out."""
    slots = torch.randperm(blocks * size, device=device)[:tokens]
    slots[tokens - skipped :] = -1
    rows = [torch.randn(tokens, heads, width, device=device, dtype=dtype) for _ in range(2)]
    caches = [torch.randn(blocks, size, heads, width, device=device, dtype=dtype) for _ in range(2)]
    return *rows, *caches, slots


def read_call(lengths, size, heads, kv_heads, width, *, columns=None, device="cpu", dtype=torch.float32):
    """Arguments of paged_attention. Each sequence has blocks of its own, in any order."""
    columns = columns or max(1, -(-max(lengths, default=0) // size))
    blocks = max(1, len(lengths) * columns)
    tables = torch.randperm(blocks, device=device)[: len(lengths) * columns].view(len(lengths), columns)
    caches = [torch.randn(blocks, size, kv_heads, width, device=device, dtype=dtype) for _ in range(2)]
    q = torch.randn(len(lengths), heads, width, device=device, dtype=dtype)
    return q, *caches, tables, torch.tensor(lengths, dtype=torch.int64, device=device), width**-0.5


def _writes(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    on = {"device": device, "dtype": dtype}
    yield Sample("3 of 4 tokens", write_call(4, 3, 5, 2, 8, skipped=1, **on))
    yield Sample("one token", write_call(1, 2, 2, 1, 16, **on))
    yield Sample("two tokens", write_call(2, 2, 3, 2, 8, **on))
    yield Sample("five tokens", write_call(5, 3, 2, 1, 4, skipped=1, **on))
    yield Sample("odd sizes", write_call(7, 4, 3, 3, 5, skipped=2, **on))
    yield Sample("no token", write_call(0, 2, 4, 2, 8, **on))
    yield Sample("all left out", write_call(3, 2, 4, 2, 8, skipped=3, **on))
    yield Sample("every slot", write_call(12, 3, 4, 2, 64, **on))


def _write_refusals(device: torch.device) -> Iterable[Refusal]:
    k, v, kc, vc, slots = write_call(4, 3, 5, 2, 8, device=device)
    shared = kc[:1].expand(3, 5, 2, 8)
    yield Refusal("kc expanded", (k, v, shared, vc, slots), r"elements of kc must not share memory, got shape \[3, 5")
    yield Refusal("vc expanded", (k, v, kc, shared, slots), r"elements of vc must not share memory.* strides \[0, 16")


def _distinct(op, kc, vc, **_):
    from paged_cache.reshape_and_cache import has_distinct_elements

    for name, cache in (("kc", kc), ("vc", vc)):
        strides = f" with strides {list(cache.stride())}"
        shared = f"{op}: elements of {name} must not share memory, got shape "
        check(has_distinct_elements(cache), shared, cache.shape, strides)


def _reads(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    on = {"device": device, "dtype": dtype}
    yield Sample("two sequences", read_call([5, 9], 3, 4, 2, 8, **on))
    yield Sample("one head", read_call([3], 4, 1, 1, 16, **on))
    yield Sample("odd sizes", read_call([7, 1, 12, 4, 2], 5, 9, 3, 5, **on))
    yield Sample("a context of no tokens", read_call([0, 6], 4, 2, 2, 8, **on))
    yield Sample("no sequence", read_call([], 4, 2, 2, 8, **on))
    yield Sample("several partitions", read_call([300, 700], 16, 8, 2, 64, **on))
    yield Sample("twelve queries a head", read_call([33], 16, 12, 1, 128, **on))
    yield Sample("wide rows", read_call([40, 17], 8, 2, 1, 256, **on))


def _read_refusals(device: torch.device) -> Iterable[Refusal]:
    q, *rest = read_call([5, 9], 3, 4, 2, 8, device=device)
    yield Refusal("3 heads over 2", (q[:, :3], *rest), "q has 3 heads, which is not a multiple of the 2 of kc")
    yield Refusal("wide rows", read_call([2], 2, 1, 1, 257, device=device), "D must be at most 256, got 257")


def _grouped(op, q, kc, **_):
    of_both = f"{op}: q has ", q.shape[1], " heads, which is not a multiple of the ", kc.shape[2], " of kc"
    check(q.shape[1] % kc.shape[2] == 0, *of_both)
    check(q.shape[2] <= 256, f"{op}: D must be at most 256, got ", q.shape[2])


WRITE = OpSpec(
    name="reshape_and_cache",
    namespace="paged_cache",
    wrapper=reshape_and_cache,
    reference=reshape_and_cache_reference,
    layout=Layout(
        inputs={"k": "T H D", "v": "T H D", "kc": "blocks size H D", "vc": "blocks size H D", "slots": "T: int64"},
        least={"H": 1, "D": 1, "blocks": 1, "size": 1},
        further=_distinct,
    ),
    samples=_writes,
    more_refusals=_write_refusals,
    autocast=None,
)

READ = OpSpec(
    name="paged_attention",
    namespace="paged_cache",
    wrapper=paged_attention,
    reference=paged_attention_reference,
    layout=Layout(
        inputs={
            "q": "B Q D",
            "kc": "blocks size H D",
            "vc": "blocks size H D",
            "block_tables": "B M: int64",
            "context_lens": "B: int64",
        },
        outputs=["B Q D"],
        least={"D": 1, "blocks": 1, "size": 1, "H": 1},
        further=_grouped,
    ),
    samples=_reads,
    more_refusals=_read_refusals,
    static=("Q", "H"),  # the reference splits Q into H groups
    autocast=None,
)
