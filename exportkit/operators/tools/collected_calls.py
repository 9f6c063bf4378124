"""Collects valid calls of an operator: a SPEC's samples, given ones, a model's, or drawn ones; and varies them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from exportkit.operators.contract.call_code import ways_to_write
from exportkit.operators.contract.findings import Finding, Severity
from exportkit.operators.contract.operator_spec import OpSpec
from exportkit.operators.contract.operator_trial import Subject, first_line, is_out_of_memory
from exportkit.operators.contract.resizing import INTEGERS, with_sizes
from exportkit.operators.contract.sample import Sample
from exportkit.operators.tools.call_search import StopSearch, search_calls
from exportkit.operators.tools.checking import MOST_SEARCH_ENDS, SEARCH, Origin
from exportkit.operators.tools.journal import Journal, Step

_LITERAL = 64  # elements of an integer tensor that a line of code spells out
_ENDED = "it ended the process"


@dataclass
class Collector:
    """Collects valid calls of one operator, and writes each to the journal before it is made.

    The first of `calls` are the origin's own; `why_none` says what was tried, if there are none. Calls to `avoid` ended
    a process before; they are code. At most so many are collected.
    """

    origin: Origin
    operator: OpOverload
    journal: Journal
    devices: Sequence[torch.device]
    dtypes: Sequence[torch.dtype]
    avoid: Sequence[str]
    seed: int
    most: int
    vary: bool = True

    def __post_init__(self) -> None:
        self._subject = Subject(self.operator, ())
        self._seed = zlib.crc32(f"{self.seed} {self._subject.name}".encode())
        self.calls: list[Sample] = []
        self.why_none = ""
        self.tried = self._avoided = 0
        self._step = Step(SEARCH)
        self.findings: dict[str, Finding] = {}
        torch.manual_seed(self._seed)

    def samples_of(self, spec: OpSpec) -> None:
        """Takes a SPEC's samples. They are not varied: the SPEC says which sizes and dtypes are valid."""
        dtypes = [dtype for dtype in spec.dtypes if dtype in self.dtypes]
        self.calls = [call for device in self.devices for dtype in dtypes for call in spec.samples(device, dtype)]
        self.why_none = "its SPEC has no samples in these dtypes"

    def varied(self, calls: Iterable[Sample]) -> None:
        """Takes calls that are known to be valid, and variations of them that the operator takes.

        The operator may refuse what the user or the model gives: that is a finding.
        """
        valid = []
        with contextlib.suppress(StopSearch):
            for call in calls:
                if (refusal := self.attempt(call)) is None:
                    valid.append(call)
                elif refusal != _ENDED:  # that is another finding
                    message = f"The operator refuses a call that was given ({call.label}): {refusal}"
                    self.findings.setdefault("runs", Finding("runs", Severity.broken, message, self._code(call)))
        self.why_none = "the operator refuses each of the given calls"
        self._vary(valid)

    def drawn(self) -> None:
        """Takes calls that are drawn from the schema, and that the operator takes."""
        calls: list[Sample] = []

        def attempt(call: Sample) -> str | None:
            call = _writable(call)
            if (refusal := self.attempt(call)) is None:
                calls.append(call)  # this one, and no other of its form: its values may make it valid
            return refusal

        for device in self.devices:
            search = search_calls(self.operator._schema, attempt, device, self._seed)
            self.why_none = self.why_none or search.summary()
        self._vary(calls)

    def attempt(self, call: Sample) -> str | None:
        """Calls the operator on copies. Returns what it refused the call with, or None.

        It raises StopSearch where the operator has ended as many processes as it may.
        """
        code = self._code(call)
        if code in self.avoid:
            self._avoided += 1
            if self._avoided >= MOST_SEARCH_ENDS:
                raise StopSearch
            return _ENDED
        self.tried += 1
        own = call.copied()
        try:
            with torch.no_grad(), self.journal.call(Step(SEARCH, code, code)):
                self._subject.overload(*own.args, **own.kwargs)
        except Exception as error:
            text = first_line(error)
            if is_out_of_memory(text):
                message = f"The call takes all of the memory: {text}"
                hint = "Refuse sizes that the kernel cannot serve. --max-memory gives it more."
                self.findings.setdefault("memory", Finding("memory", Severity.broken, message, code, hint))
            return text
        return None

    def resized(self, call: Sample, changes: Mapping[int, int]) -> Sample | None:
        """Returns a call at other sizes, or None if there is none, or if it ended a process before."""
        other = with_sizes(call, changes) if self.vary else None
        return None if other is None or (self.avoid and self._code(other) in self.avoid) else other

    def progress(self, check: str, call: Sample | None) -> None:
        """Writes down what the checks do next."""
        code = None if call is None else self._code(call)
        self._step = Step(check, code, code)
        self.journal.write(self._step)

    @property
    def check(self) -> str:
        """The check that is running."""
        return self._step.check

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Writes down each call that a check makes: it may change the strides of the call that it was given."""
        return watched_calls(self._subject.overload, self._see)

    def _see(self, call: Sample) -> contextlib.AbstractContextManager[None]:
        code = code_in_memory(self._subject, call)
        return self.journal.call(Step(self._step.check, code, self._step.given))

    def _code(self, call: Sample) -> str:
        """Writes the call with its own values, in the shortest way that gives these."""
        written = None
        for written in ways_to_write(call):
            if all(map(torch.equal, written.call.tensors, call.tensors)):
                break
        assert written is not None
        return written.code(self._subject)

    def _vary(self, calls: list[Sample]) -> None:
        self.calls = kept = list(calls[: self.most])
        with contextlib.suppress(StopSearch):
            for call in itertools.islice(self._variations(calls), 4 * self.most):
                if len(kept) >= self.most:
                    break
                other = _writable(call) if self.origin == "drawn" else call
                if self.attempt(other) is None:
                    kept.append(other)

    def _variations(self, calls: Sequence[Sample]) -> Iterator[Sample]:
        """Yields the first call's variations first, since it is the simplest, then the others at a large size."""
        calls = [call for call in calls if call.tensors] if self.vary else []
        sizes = [at_sizes(call) for call in calls]
        for call, resized in list(zip(calls, sizes))[:3]:
            yield from (other for other in in_dtypes(call, self.dtypes) if other is not call)
            yield from resized
            yield from in_other_integers(call)
            if call is calls[0]:
                for others in sizes[1:]:
                    yield from itertools.islice(others, 1)


def _writable(call: Sample) -> Sample:
    """Returns the call with other random values: those that a line of code gives, which is shorter than all of them."""
    if any(not t.is_floating_point() and t.numel() > _LITERAL for t in call.tensors):
        return call
    return next(ways_to_write(call)).call


# --- calls like a valid one: whether the operator takes them is found by trial ----------------------------------------


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


_ALIGNED = 64  # bytes: where torch's memory begins
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def watched_calls(operator: OpOverload, see: Callable[[Sample], AbstractContextManager[None]]) -> Iterator[None]:
    """Makes each call on real tensors in the context that `see` returns, which is told of the memory that they have.

    It is asked for a call of this thread that differs from the one before.
    """
    dispatch, this_thread, last = operator._op, threading.get_ident(), [object()]

    def context(call: Sample) -> AbstractContextManager[None]:
        tensors = call.tensors
        if threading.get_ident() != this_thread or not all(type(t) in _PLAIN for t in tensors):
            return contextlib.nullcontext()
        # torch.func's tensors look plain, and have no values to be shown.
        with contextlib.suppress(Exception):
            form = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
            if form != last[0]:
                last[0] = form
                with _disable_current_modes(), torch.no_grad():
                    return see(call)
        return contextlib.nullcontext()

    def watched(*args: Any, **kwargs: Any) -> Any:
        with context(Sample("", args, kwargs)):
            return dispatch(*args, **kwargs)

    operator._op = watched
    try:
        yield
    finally:
        operator._op = dispatch


def code_in_memory(subject: Subject, call: Sample) -> str:
    """Writes a call whose tensors begin as far from an aligned address as they do now: that alone may end a process.

    Tensors in lists are written without their offset.
    """
    args, ends = [], []
    for value in call.args:
        memory, end = _memory_of(value) if isinstance(value, torch.Tensor) else (value, "")
        args.append(memory)
        ends.append(end)
    *_, written = ways_to_write(Sample(call.label, tuple(args), call.kwargs))
    codes = tuple(code + end for code, end in zip(written.args, ends))
    return replace(written, args=codes).code(subject)


def _memory_of(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Returns the memory of a tensor from the last aligned address on, and what makes the tensor of it, as code."""
    offset = tensor.storage_offset() % (_ALIGNED // tensor.element_size())
    if not offset or not tensor.numel():
        return tensor, ""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = torch.as_strided(tensor.detach(), (offset + reach,), (1,), tensor.storage_offset() - offset)
    return memory.clone(), f".as_strided({tuple(tensor.shape)}, {tensor.stride()}, {offset})"
