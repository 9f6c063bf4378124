"""The operator `paged_cache::paged_attention`."""

import torch
from torch import Tensor

from paged_cache._common import check, check_tensors, ops, wide


def paged_attention(
    q: Tensor, kc: Tensor, vc: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Attends from one token of each sequence to its context, which lies in blocks of a cache. It has no gradient.

    Query head h reads head h // (Q / H) of the cache (grouped queries). A context of no tokens gives zeros. A block
    or a length that cannot be is refused on a CPU. On CUDA, where nobody waits for the kernel, its sequence gets NaN.
    Nothing outside of the cache is read.

    Args:
        q: [B, Q, D]; float32, float64, float16 or bfloat16; D is at most 256.
        kc: The cache of keys [blocks, size, H, D]; Q is a multiple of H.
        vc: The cache of values [blocks, size, H, D].
        block_tables: int64 [B, M]. Token t of a sequence is at place t % size of the block in column t // size. Columns
            beyond the context are not read.
        context_lens: int64 [B], each from 0 to M * size.
        scale: The factor of the scores, often 1 / sqrt(D).

    Returns:
        [B, Q, D], with the dtype of q.

    Raises:
        RuntimeError: An argument is not as it must be.
    """
    return ops.paged_attention(q, kc, vc, block_tables, context_lens, scale)


def paged_attention_reference(
    q: Tensor, kc: Tensor, vc: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Computes the same with torch's operators; NaN for a block or a length that cannot be."""
    batch, heads, width = q.shape
    blocks, size, kv_heads, _ = kc.shape
    length = block_tables.shape[1] * size
    counts = torch.arange(length, device=q.device) < context_lens[:, None]  # [B, length]
    which = block_tables.clamp(0, blocks - 1)

    def gathered(cache: Tensor) -> Tensor:
        rows = wide(cache[which]).reshape(batch, length, kv_heads, width)
        return torch.where(counts[:, :, None, None], rows, 0)  # what is beyond a context may be NaN

    grouped = wide(q).reshape(batch, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("bhgd,bthd->bhgt", grouped * scale, gathered(kc))
    weights = torch.softmax(scores.masked_fill(~counts[:, None, None, :], -torch.inf), dim=-1)
    out = torch.einsum("bhgt,bthd->bhgd", weights, gathered(vc)).reshape(batch, heads, width)
    beyond = counts & ((block_tables < 0) | (block_tables >= blocks)).repeat_interleave(size, dim=1)
    wrong = beyond.any(1) | (context_lens < 0) | (context_lens > length)
    out = torch.where((context_lens > 0)[:, None, None], out, 0)
    return torch.where(wrong[:, None, None], torch.nan, out).to(q.dtype)


@torch.library.register_fake("paged_cache::paged_attention")
def _fake(q: Tensor, kc: Tensor, vc: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float) -> Tensor:
    op = "paged_attention"
    layout = {
        "q": (q, "B Q D"),
        "kc": (kc, "blocks size H D"),
        "vc": (vc, "blocks size H D"),
        "block_tables": (block_tables, "B M: int64"),
        "context_lens": (context_lens, "B: int64"),
    }
    check_tensors(op, layout, {"D": 1, "blocks": 1, "size": 1, "H": 1})
    of_both = f"{op}: q has ", q.shape[1], " heads, which is not a multiple of the ", kc.shape[2], " of kc"
    check(q.shape[1] % kc.shape[2] == 0, *of_both)
    check(q.shape[2] <= 256, f"{op}: D must be at most 256, got ", q.shape[2])
    return q.new_empty(q.shape)
