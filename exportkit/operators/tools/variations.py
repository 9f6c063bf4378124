"""Calls like a valid one, in other dtypes and at other sizes. Whether the operator takes them is found by trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from exportkit.operators.contract.resizing import INTEGERS, with_sizes
from exportkit.operators.contract.sample import Sample


def in_dtypes(call: Sample, dtypes: Iterable[torch.dtype]) -> Iterator[Sample]:
    """Yields the call with its floating tensors of the most frequent dtype in each of the dtypes, itself first."""
    floating = [t.dtype for t in call.tensors if t.is_floating_point()]
    if not floating:
        yield call
        return
    own = max(floating, key=floating.count)
    for dtype in sorted(dtypes, key=lambda each: each != own):
        if dtype == own:
            yield call
        else:
            yield _cast(call, (own,), dtype)


def in_other_integers(call: Sample) -> Iterator[Sample]:
    """Yields the call with its integers in int32 instead of int64, and the reverse."""
    if any(t.dtype in INTEGERS for t in call.tensors):
        for dtype in INTEGERS:
            if any(t.dtype in INTEGERS and t.dtype != dtype for t in call.tensors):
                yield _cast(call, INTEGERS, dtype)


def at_sizes(call: Sample) -> Iterator[Sample]:
    """Yields the call at sizes that break kernels: more than one vector and one thread's share, odd, one, none."""
    sizes = list(dict.fromkeys(size for t in call.tensors for size in t.shape))
    if not sizes:
        return
    first, last = sizes[0], next(t.shape[-1] for t in call.tensors if t.shape)
    for changes in ({last: 131}, {first: 7}, {first: 1}, {first: 67, last: 517}, {first: 0}, {last: 1}):
        if any(old != new for old, new in changes.items()) and (other := with_sizes(call, changes)) is not None:
            yield other


def _cast(call: Sample, dtypes: Sequence[torch.dtype], to: torch.dtype) -> Sample:
    cast = call.with_tensors(lambda t: t.to(to) if t.dtype in dtypes else t)
    return Sample(f"{call.label}, {str(to)[6:]}", cast.args, cast.kwargs)
