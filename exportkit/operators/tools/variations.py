"""Calls like a valid one, in other dtypes and at other sizes. Whether the operator takes them is found by trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from exportkit.operators.contract.operator_spec import Sample
from exportkit.operators.contract.operator_trial import arguments, with_tensors

_INTEGERS = (torch.int32, torch.int64)


def in_dtypes(call: Sample, dtypes: Iterable[torch.dtype]) -> Iterator[Sample]:
    """Yields the call with its floating tensors of the most frequent dtype in each of the dtypes, itself first."""
    floating = [t.dtype for t in arguments(call) if t.is_floating_point()]
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
    if any(t.dtype in _INTEGERS for t in arguments(call)):
        for dtype in _INTEGERS:
            if any(t.dtype in _INTEGERS and t.dtype != dtype for t in arguments(call)):
                yield _cast(call, _INTEGERS, dtype)


def at_sizes(call: Sample) -> Iterator[Sample]:
    """Yields the call at sizes that break kernels: more than one vector and one thread's share, odd, one, none."""
    sizes = list(dict.fromkeys(size for t in arguments(call) for size in t.shape))
    if not sizes:
        return
    first, last = sizes[0], next(t.shape[-1] for t in arguments(call) if t.shape)
    for changes in ({last: 131}, {first: 7}, {first: 1}, {first: 67, last: 517}, {first: 0}, {last: 1}):
        if any(old != new for old, new in changes.items()) and (other := resized(call, changes)) is not None:
            yield other


def resized(call: Sample, changes: Mapping[int, int]) -> Sample | None:
    """Returns the call at other sizes, or None if its indices would point to nothing.

    Sizes that are equal stay equal, and a number that is equal to a size follows it. Integers that could be indices
    into a size, or offsets up to it, stay below it, or reach it.

    Args:
        call: A call.
        changes: Which size becomes which.
    """

    def change(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _resized(value, changes)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            return changes.get(value, value)
        return value

    lists = (call.args, dict(call.kwargs))
    args, kwargs = pytree.tree_map(change, lists)
    made = Sample("", args, kwargs)
    for old, new in changes.items():
        if new < old and not _clamp(arguments(made), old, new):
            return None
    shapes = ", ".join(str(list(t.shape)) for t in arguments(made))
    return Sample(f"resized to {shapes}", args, kwargs)


def _clamp(tensors: Sequence[Tensor], old: int, new: int) -> bool:
    """Keeps integers that were below a size, or reached it, so. Returns whether that is possible."""
    for tensor in tensors:
        if tensor.dtype not in _INTEGERS or not tensor.numel() or int(tensor.max()) < new:
            continue
        reaches = bool(tensor.eq(old).any())
        if new == 0 and not reaches:
            return False
        tensor.clamp_(max=new if reaches else new - 1)
    return True


def _resized(tensor: Tensor, changes: Mapping[int, int]) -> Tensor:
    """Repeats or drops elements. A dimension that was empty is filled with ones."""
    result = tensor.detach().clone()
    for dim, size in enumerate(tensor.shape):
        new = changes.get(size, size)
        if size == 0 and new:
            result = torch.ones([*result.shape[:dim], new, *result.shape[dim + 1 :]]).to(tensor)
        elif new != size:
            result = result.index_select(dim, torch.arange(new, device=tensor.device) % size)
    return result


def _cast(call: Sample, dtypes: Sequence[torch.dtype], to: torch.dtype) -> Sample:
    cast = with_tensors(call, lambda t: t.to(to) if t.dtype in dtypes else t)
    return Sample(f"{call.label}, {str(to)[6:]}", cast.args, cast.kwargs)
