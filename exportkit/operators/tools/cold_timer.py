"""Times single calls whose inputs are in no cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

_CPU_CACHES = 64 << 20  # bytes, which the last caches of most CPUs do not hold
_IDLE = 5e-5  # seconds; to wait for a device that has nothing to do takes less
_CUDA_FILLS = 20  # about a millisecond, in which a call is launched


class ColdTimer:
    """Fills the caches with something else before each call."""

    def __init__(self, device: torch.device) -> None:
        """Makes a timer for calls on a device."""
        self._cuda = device.type == "cuda"
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size if self._cuda else _CPU_CACHES
        self._other = torch.empty(size, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], T], inputs: Sequence[torch.Tensor]) -> tuple[T, float]:
        """Returns what a call returns, and its milliseconds.

        On CUDA the call is launched while the caches are filled, so its kernels alone are timed. Who does not wait for
        that, on another stream, reads inputs whose last numbers are still NaN. What is left there afterwards is timed.
        """
        if not self._cuda:
            self._other.fill_(1)
            begin = time.perf_counter()
            result = call()
            return result, (time.perf_counter() - begin) * 1e3
        floats = [each for each in inputs if each.is_floating_point() and each.itemsize > 1 and each.numel()]
        last = [each[(-1,) * each.dim()] for each in floats]
        values = [number.clone() for number in last]
        for number in last:
            number.fill_(torch.nan)
        for _ in range(_CUDA_FILLS):
            self._other.fill_(1)
        for number, value in zip(last, values):
            number.copy_(value)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        begin = time.perf_counter()
        torch.cuda.synchronize()
        beside = time.perf_counter() - begin
        return result, start.elapsed_time(end) + (beside * 1e3 if beside > _IDLE else 0.0)
