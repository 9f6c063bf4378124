"""The same call at other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample

INTEGERS = (torch.int32, torch.int64)


def sizes_of(call: Sample) -> list[int]:
    """Returns the different sizes in a call, the largest first."""
    return sorted({size for t in call.tensors for size in t.shape}, reverse=True)


def grown(call: Sample, old: int, new: int) -> float:
    """Returns how many elements the call has with another size."""
    return sum(t.numel() * (new / old) ** t.shape.count(old) for t in call.tensors)


def resized(subject: Subject, call: Sample, changes: Mapping[int, int]) -> Sample | None:
    """Returns the call with other sizes, or None if the subject cannot make one.

    Whether the result is a valid call is for the operator to say.
    """
    if subject.resize is not None:
        return subject.resize(call, changes)
    return with_sizes(call, changes, indices=subject.spec is None)


def with_sizes(call: Sample, changes: Mapping[int, int], *, indices: bool = True) -> Sample | None:
    """Returns the call at other sizes, or None if its indices would point to nothing.

    Sizes that are equal stay equal, and a number that is equal to a size follows it. With `indices`, integers that
    could be indices into a size, or offsets up to it, stay below it, or reach it.
    """

    def change(value: object) -> object:
        if isinstance(value, Tensor):
            return _resized(value, changes)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            return changes.get(value, value)
        return value

    args, kwargs = pytree.tree_map(change, (call.args, dict(call.kwargs)))
    found = Sample("", args, kwargs)
    for old, new in changes.items():
        if indices and new < old and not _clamp(found.tensors, old, new):
            return None
    return Sample(f"resized to {', '.join(str(list(t.shape)) for t in found.tensors)}", args, kwargs)


def _clamp(tensors: Sequence[Tensor], old: int, new: int) -> bool:
    """Keeps integers that were below a size, or reached it, so. Returns whether that is possible."""
    for tensor in tensors:
        if tensor.dtype not in INTEGERS or not tensor.numel() or int(tensor.max()) < new:
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


def neighbours(subject: Subject, call: Sample) -> Iterator[Sample]:
    """Yields calls with one size changed: empty, one, and each kind of size (even, odd) that the call does not have."""
    for size in sizes_of(call):
        for new in (0, 1, size + 1, 2 * size + 1):
            if new != size and (other := resized(subject, call, {size: new})) is not None:
                yield other


def smaller(subject: Subject, call: Sample) -> Iterator[Sample]:
    """Yields calls with one size made smaller, the smallest first."""
    for size in sizes_of(call):
        for new in sorted({0, 1, 2, 3, size // 2, size - 2, size - 1}):
            if 0 <= new < size and (other := resized(subject, call, {size: new})) is not None:
                yield other
