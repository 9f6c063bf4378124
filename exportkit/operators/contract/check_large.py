"""Sizes beyond 16 bits and beyond one thread's share, where a call takes long enough for others to meet it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from exportkit.operators.contract.check_repeats import met_by_others
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import difference
from exportkit.operators.contract.fake_kernel import fake_answer
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_spec import default_tolerance
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.resizing import grown, resized
from exportkit.operators.contract.sample import Sample

_LAW = 1025  # up to here it is found out how answers follow a size. In blocks of any power of two, one is left over
_SIZES = (8193, 66_049)
_ELEMENTS = 2**20
_EXPECTED = 2.0  # seconds that a call may be expected to take
_SHORT = 0.5  # seconds of a call that threads make
_SECONDS = 0.2  # that threads call


@ContractCheck(
    "large",
    "Look at the type of each index, at the tail of each thread's share, at what threads write to, and at buffers that "
    "calls share.",
    order=62,
    unless=("determinism", "mutation", "aliasing", "kept-inputs", "batch", "threads"),
    whole=True,
)
def large(trial: Trial) -> Problem | None:
    """With 66,049 rows or columns, answers repeat with their inputs, and are at once what they are alone."""
    call, seconds = None, 0.0
    for small, old in _bases(trial):
        less = [_not_repeated(trial, small, old, each) for each, _ in _larger(trial, small, old, 2 * old + 1, _LAW)]
        for call, took in _larger(trial, small, old, _LAW, *_SIZES):
            seconds = took
            if less == [None, None] and (said := _not_repeated(trial, small, old, call)):
                text = f"The same values must have the same answers at each size, as up to {_LAW}, but {said}."
                return Problem(text, severity=Severity.doubtful, call=call)
        if call is not None and seconds < _SHORT and (problem := met_by_others(trial, call, _SECONDS)):
            return problem
    if call is None:
        raise NotApplicable("no call of it can be made large")
    return None


def _bases(trial: Trial) -> Iterator[tuple[Sample, int]]:
    """Yields a call with its first size, and one with its last: the smallest where no other size is equal."""
    calls = [call for call in trial.subject.calls if call.floating_dtype is not None and not trial.subject.is_mutable]
    for dim in (0, -1):
        for call in sorted(calls, key=lambda call: call.elements):
            shape = next((t.shape for t in call.tensors if t.dim()), ())
            if shape and shape[dim] > 1 and shape.count(shape[dim]) == 1 and call.elements:
                yield call, shape[dim]
                break


def _larger(trial: Trial, small: Sample, old: int, *sizes: int) -> Iterator[tuple[Sample, float]]:
    """Yields the call at other sizes, with its seconds, while the operator takes them and the next is not too long."""
    before = 0.0
    for new in sizes:
        call = resized(trial.subject, small, {old: new}) if grown(small, old, new) <= _ELEMENTS else None
        try:
            if call is None or not fake_answer(trial, call):
                return
            began = time.perf_counter()
            trial.answer(call)
        except Exception:  # the operator may refuse the size
            return
        seconds = time.perf_counter() - began
        yield call, seconds
        if seconds * max(8.0, seconds / before if before else 64.0) > _EXPECTED:
            return
        before = seconds


def _not_repeated(trial: Trial, small: Sample, old: int, call: Sample) -> str | None:
    """Says where answers do not repeat those of the small call, as those of elements, rows and maxima do."""
    for index, (one, many) in enumerate(zip(trial.answer(small), trial.answer(call))):
        for dim, size in enumerate(one.shape):
            if size == old and many.dim() == one.dim() and many.shape[dim] > old:
                one = one.index_select(dim, torch.arange(many.shape[dim], device=one.device) % size)
        if text := difference(many, one, *default_tolerance(one.dtype)):
            return f"in output {index} {text}"
    return None
