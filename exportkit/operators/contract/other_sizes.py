"""The same call at other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from exportkit.operators.contract.operator_spec import Sample
from exportkit.operators.contract.operator_trial import arguments
from exportkit.operators.contract.subject import Subject


def sizes_of(call: Sample) -> list[int]:
    """Returns the different sizes in a call, the largest first."""
    return sorted({size for t in arguments(call) for size in t.shape}, reverse=True)


def resized(subject: Subject, call: Sample, changes: Mapping[int, int]) -> Sample | None:
    """Returns the call with other sizes, or None if the subject cannot make one.

    Sizes that are equal stay equal, and a number that is equal to a size follows it. Whether the result is a valid call
    is for the operator to say.

    Args:
        subject: The operator.
        call: A call of it.
        changes: Which size becomes which.
    """
    if subject.resize is not None:
        return subject.resize(call, changes)
    if subject.spec is None and any(_is_index(t) for t in arguments(call)):
        return None

    def change(value: object) -> object:
        if isinstance(value, Tensor):
            return _resized(value, changes)
        if isinstance(value, int) and not isinstance(value, bool):
            return changes.get(value, value) if value > 1 else value
        return value

    args, kwargs = pytree.tree_map(change, (call.args, dict(call.kwargs)))
    shapes = ", ".join(str(list(t.shape)) for t in arguments(Sample("", args, kwargs)))
    return Sample(f"resized to {shapes}", args, kwargs)


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _resized(tensor: Tensor, changes: Mapping[int, int]) -> Tensor:
    """Repeats or drops elements. A dimension that was empty is filled with ones."""
    result = tensor.detach()
    for dim, size in enumerate(tensor.shape):
        new = changes.get(size, size)
        if new == size:
            continue
        if size == 0:
            result = torch.ones([*result.shape[:dim], new, *result.shape[dim + 1 :]]).to(tensor)
        else:
            result = result.index_select(dim, torch.arange(new, device=tensor.device) % size)
    return result.clone() if result is tensor else result


def neighbours(subject: Subject, call: Sample) -> Iterator[Sample]:
    """Yields calls with one size changed: empty, one, and each kind of size (even, odd) that the call does not have."""
    for size in sizes_of(call):
        for new in (0, 1, size + 1, 2 * size + 1):
            if new != size and (other := resized(subject, call, {size: new})) is not None:
                yield other


def smaller(subject: Subject, call: Sample) -> Iterable[Sample]:
    """Yields calls with one size made smaller, the smallest first."""
    for size in sizes_of(call):
        for new in sorted({0, 1, 2, 3, size // 2, size - 2, size - 1}):
            if 0 <= new < size and (other := resized(subject, call, {size: new})) is not None:
                yield other
