"""Fills memory before code gets it: code that reads what nothing wrote is then wrong in each run, and not in some."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal

Content = Literal["", "NaN", "numbers"]

CONTENTS: tuple[Content, ...] = ("NaN", "numbers")
"""What memory is filled with: NaN, and numbers about 10. Code may be right by chance in memory of one kind."""

MALLOC_BYTES: Mapping[Content, int] = {"": 0, "NaN": 0x7F, "numbers": 0x41}
"""The byte that glibc fills freed memory with; it fills new memory with the complement. It has no byte for NaN."""

_M_PERTURB = -6
_SMALL = 1 << 20  # bytes
_GPU_BYTES: Mapping[Content, int] = {"NaN": 0xFF, "numbers": 0x41}


@contextmanager
def filled_memory(content: Content, device: str = "cpu") -> Iterator[None]:
    """Fills the memory that this process gets while the block runs: torch's, and what C++ code allocates itself.

    On a GPU, what torch has reserved and nothing uses is filled when the block begins.
    """
    if not content:
        yield
        return
    if device.startswith("cuda"):
        _fill_reserved(device, _GPU_BYTES[content])
    libc = ctypes.CDLL(None)
    torchs_own = _torchs_own()
    libc.mallopt(_M_PERTURB, MALLOC_BYTES[content])
    torchs_own.value = content == "NaN"
    try:
        yield
    finally:
        torchs_own.value = False
        libc.mallopt(_M_PERTURB, 0)


def _torchs_own() -> ctypes.c_bool:
    """Returns torch's variable for whether it fills new tensors with 0x7fedbeef: a NaN of float32, and great else."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ctypes.c_bool()
    with suppress(ValueError):  # this torch has no such variable
        return ctypes.c_bool.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_cpu_allocator_do_junk_fill")
    return ctypes.c_bool()


def _fill_reserved(device: str, byte: int) -> None:
    import torch

    index, sizes = torch.device(device).index or 0, list[int]()
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"] if segment["device"] == index else ():
            if block["state"] != "inactive":
                continue
            # Tensors up to this size come from small segments, and others from large ones.
            whole, rest = divmod(block["size"], _SMALL) if segment["segment_type"] == "small" else (0, block["size"])
            sizes += [_SMALL] * whole
            if rest and (segment["segment_type"] == "small" or rest > _SMALL):
                sizes.append(rest)
    held = [torch.empty(size, dtype=torch.uint8, device=device).fill_(byte) for size in sorted(sizes, reverse=True)]
    del held
    torch.cuda.synchronize(device)
