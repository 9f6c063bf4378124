"""Finds tensors that share memory: what a call writes must be nobody else's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the end of its last; both are 0 if it has no elements."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (int(last) + 1) * tensor.itemsize


class Spans:
    """The memory of tensors that do not overlap one another."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the tensors with their names."""
        found = sorted((*span(tensor), name) for name, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in found]
        self._ends = [end for _, end, _ in found]
        self._names = [name for _, _, name in found]

    def overlapping(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a tensor that shares memory with this one; None if there is none."""
        start, end = span(tensor)
        # The last one that begins before this one's end is the only one of those that can reach into it.
        place = bisect_right(self._starts, end - 1) - 1
        return self._names[place] if end and place >= 0 and self._ends[place] > start else None
