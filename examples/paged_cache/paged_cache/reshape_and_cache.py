"""The operator `paged_cache::reshape_and_cache`, which writes to two arguments."""

import torch
from torch import Tensor

from paged_cache._common import check, check_tensors, ops


def reshape_and_cache(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> None:
    """Writes the keys and values of tokens into their slots of a cache. It has no gradient.

    Slot s is place s % size of block s // size. A token whose slot is negative is left out, as in vLLM. Two tokens must
    not have one slot. A slot beyond the cache is refused on a CPU, before anything is written. On CUDA, where nobody
    waits for the kernel, its token is left out. Nothing is ever written outside of the cache.

    Args:
        k: Keys [T, H, D]; float32, float64, float16 or bfloat16.
        v: Values [T, H, D].
        kc: The cache of keys [blocks, size, H, D], which is written in place. Its elements share no memory.
        vc: The cache of values [blocks, size, H, D], alike.
        slots: int64 [T].

    Raises:
        RuntimeError: An argument is not as it must be.
    """
    ops.reshape_and_cache(k, v, kc, vc, slots)


def reshape_and_cache_reference(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> None:
    """Computes the same with torch's operators, for each slot of the cache."""
    blocks, size = kc.shape[:2]
    tokens = torch.arange(k.shape[0], device=k.device)
    comes = slots == torch.arange(blocks * size, device=k.device)[:, None]
    written = comes.any(1).view(blocks, size, 1, 1)
    which = torch.where(comes, tokens, 0).sum(1)
    for rows, cache in ((k, kc), (v, vc)):
        some = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])  # there may be no tokens
        cache.copy_(torch.where(written, some[which].view(cache.shape), cache))


def has_distinct_elements(tensor: Tensor) -> bool:
    """Returns whether every stride steps past the extent of the smaller ones."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    reach = 0
    for stride, size in sorted((st, s) for st, s in zip(tensor.stride(), tensor.shape) if s != 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


@torch.library.register_fake("paged_cache::reshape_and_cache")
def _fake(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> None:
    op = "reshape_and_cache"
    layout = {
        "k": (k, "T H D"),
        "v": (v, "T H D"),
        "kc": (kc, "blocks size H D"),
        "vc": (vc, "blocks size H D"),
        "slots": (slots, "T: int64"),
    }
    check_tensors(op, layout, {"H": 1, "D": 1, "blocks": 1, "size": 1})
    for name, cache in (("kc", kc), ("vc", vc)):
        strides = f" with strides {list(cache.stride())}"
        shared = f"{op}: elements of {name} must not share memory, got shape "
        check(has_distinct_elements(cache), shared, cache.shape, strides)
