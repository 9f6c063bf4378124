"""Many calls: in a batch, at the same time, one after another, and at sizes where they take long enough to meet."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from exportkit.operators.contract.check_fakes import fake_answer
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import difference, first_difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_spec import default_tolerance
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.resizing import grown, resized
from exportkit.operators.contract.sample import Sample

_LARGE = 4096

# --- batches ----------------------------------------------------------------------------------------------------------


@ContractCheck(
    "batch",
    "Compute each row from this row alone, in the same order whatever the size of the batch. An operator that mixes "
    "rows on purpose, such as a softmax over the first dimension, must not be batched.",
    order=42,
    unless=("determinism",),
)
def batch(trial: Trial, call: Sample) -> Problem | None:
    """Each row has the same answer alone, in its batch, and among the same rows in reverse, bit for bit."""
    if trial.subject.is_mutable:
        raise NotApplicable("the operator writes to an argument")
    whole = trial.answer(call)
    size = _batch_size(trial, call, whole)
    severity = Severity.broken if trial.subject.spec is not None else Severity.doubtful
    for index in range(size) if call.elements <= _LARGE else (0, size - 1):
        alone = trial.varied_answer(_rows(call, size, slice(index, index + 1)), "a row of the call alone")
        if any(a.dim() == 0 or a.shape[0] != 1 for a in alone):
            raise NotApplicable("the outputs do not follow the batch")
        if found := first_difference([a[0] for a in alone], [w[index] for w in whole]):
            what = "A row of a batch must have the answer that it has alone"
            text = f"{what}, but for row {index} of {size}, {found} (alone, and in the batch)."
            return Problem(text, severity=severity)
    reverse = torch.arange(size - 1, -1, -1, device=call.device)
    turned = trial.varied_answer(_rows(call, size, reverse), "the rows in reverse")
    if found := first_difference(turned, [w.index_select(0, reverse) for w in whole]):
        text = f"The order of the {size} rows must not change their answers, but {found}."
        return Problem(text, severity=severity)
    return None


def _batch_size(trial: Trial, call: Sample, outputs: list[Tensor]) -> int:
    given = call.tensors
    size = next((t.shape[0] for t in given if t.dim()), 0)
    if size < 2 or any(t.dim() == 0 or t.shape[0] != size for t in outputs):
        raise NotApplicable("the call has no batch of at least two rows in its inputs and outputs")
    if trial.subject.spec is None:
        elsewhere = any(size in t.shape[1:] for t in given) or any(t.dim() == 1 and t.shape[0] == size for t in given)
        if elsewhere:
            raise NotApplicable("the batch's size is another dimension's size, too")
    return size


def _rows(call: Sample, size: int, which: slice | Tensor) -> Sample:
    return call.with_tensors(lambda t: t[which] if t.dim() > 1 and t.shape[0] == size else t)


# --- threads ----------------------------------------------------------------------------------------------------------

_THREADS = 4
_BURST = 40
_BURSTS = 4
_THREAD_ELEMENTS = 20_000
_SHOWN = (
    "from concurrent.futures import ThreadPoolExecutor\n"
    "calls = [[a.flip(0) if i % 2 and isinstance(a, torch.Tensor) and a.dim() else a for a in args] "
    "for i in range(200)]\n"
    "alone = [{op}(*c) for c in calls]\n"
    "at_once = list(ThreadPoolExecutor(4).map(lambda c: {op}(*c), calls))"
)


@ContractCheck(
    "threads",
    "Share no buffer between calls: allocate what a call needs in the call, or make the buffer thread_local.",
    order=60,
    dtypes="first",
    most=3,
    unless=("determinism", "mutation", "kept-inputs"),
)
def threads(trial: Trial, call: Sample) -> Problem | None:
    """Calls from several threads at once, on different inputs and CUDA streams, answer as alone."""
    if not 0 < call.elements <= _THREAD_ELEMENTS:
        raise NotApplicable("the call is empty, or large")
    return met_by_others(trial, call)


def met_by_others(trial: Trial, call: Sample, seconds: float = 0.0) -> Problem | None:
    """Compares what threads get, each for its own values, with what they get alone: for seconds, or some times."""
    calls = [_turned(call, shift) for shift in range(_THREADS)]
    for one in calls:
        trial.varied_answer(one, "other values")
    # In a thread, too: a sum may be taken in as many parts as the thread has threads of its own.
    expected = [_at_once(trial, [one], 1)[0][0] for one in calls]
    ends, bursts = time.monotonic() + seconds, _BURSTS if call.elements <= _LARGE else 1
    with _frequent_switches():
        while bursts > 0 if not seconds else time.monotonic() < ends:
            bursts -= 1
            for which, answers in enumerate(_at_once(trial, calls, 2 if seconds else _BURST)):
                if said := next(filter(None, (_said(answer, expected[which]) for answer in answers)), None):
                    message = f"{_THREADS} threads that call the operator at once, each on its own inputs, must get"
                    return Problem(f"{message} what they get alone, but {said}.", shown=_SHOWN, call=call)
    return None


def _at_once(trial: Trial, calls: list[Sample], burst: int) -> list[list[list[Tensor] | Exception]]:
    """Returns what each thread gets that makes its call again and again, on a CUDA device on a stream of its own."""
    answers: list[list[list[Tensor] | Exception]] = [[] for _ in calls]
    start = threading.Barrier(len(calls))
    caller = torch.cuda.current_stream(calls[0].device) if calls[0].device.type == "cuda" else None

    def work(which: int) -> None:
        start.wait()
        try:
            with _beside(caller):
                answers[which] += [trial.used_up(own) for own in copies[which]]
        except Exception as error:
            answers[which].append(error)

    copies = [[call.copied() if trial.subject.is_mutable else call for _ in range(burst)] for call in calls]
    workers = [threading.Thread(target=work, args=(which,)) for which in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return answers


@contextmanager
def _beside(caller: torch.cuda.Stream | None) -> Iterator[None]:
    """Launches on another stream, as a server's threads do; what the caller launches later waits for it."""
    if caller is None:
        yield
        return
    own = torch.cuda.Stream(caller.device)
    own.wait_stream(caller)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        caller.wait_stream(own)


def _said(answer: list[Tensor] | Exception, expected: list[Tensor] | Exception) -> str:
    if isinstance(answer, Exception):
        return f"a call fails: {first_line(answer)}"
    if isinstance(expected, Exception):
        raise NotApplicable(f"the operator refuses other values: {first_line(expected)}")
    found = first_difference(answer, expected)
    return f"{found} (at once, and alone)" if found else ""


def _turned(call: Sample, shift: int) -> Sample:
    def turned(tensor: Tensor) -> Tensor:
        flat = tensor.flatten()
        bits = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # float8 has few operators
        return bits.roll(shift).view(flat.dtype).view(tensor.shape)

    return call.with_tensors(lambda t: turned(t) if t.is_floating_point() else t)


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Lets Python's threads take turns often, so that a race shows within few calls."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# --- leaks ------------------------------------------------------------------------------------------------------------

_WINDOW = 60
_WINDOWS = 3


@ContractCheck(
    "leak",
    "Free in the call what the call allocates: in C++, let a tensor own the memory; in Python, keep no results.",
    order=61,
    dtypes="first",
    most=2,
    unless=("kept-inputs",),
)
def leak(trial: Trial, call: Sample) -> Problem | None:
    """Memory in use does not grow with the number of calls."""
    if not 0 < call.elements <= _THREAD_ELEMENTS:
        raise NotApplicable("the call is empty, or large")
    if _growth(trial, call) is None:
        return None
    gc.collect()
    if (grown := _growth(trial, call)) is None:  # it was a cache that filled, or garbage
        return None
    what, amount = grown
    return Problem(
        f"Memory in use must not grow with the number of calls, but each call leaves {amount} {what} behind."
    )


def _growth(trial: Trial, call: Sample) -> tuple[str, int] | None:
    """Returns what grows in every one of several windows of calls, and by how much for each call."""
    own = call.copied()
    _repeat(trial, own)
    windows = [_window(trial, own) for _ in range(_WINDOWS)]
    for what, least in (("bytes", _WINDOW * 8), ("Python objects", _WINDOW), ("bytes of GPU memory", _WINDOW)):
        steps = [window[what] for window in windows]
        if min(steps) >= least:
            return what, min(steps) // _WINDOW
    return None


def _window(trial: Trial, call: Sample) -> dict[str, int]:
    """Returns what grows while the call is repeated. What a reading leaves, as of torch's counters, does not count."""
    idle, before = _in_use(call), _in_use(call)
    _repeat(trial, call)
    after = _in_use(call)
    return {what: after[what] - before[what] - (before[what] - idle[what]) for what in after}


def _repeat(trial: Trial, call: Sample) -> None:
    with torch.no_grad():
        for _ in range(_WINDOW):
            trial.run(call, trial.subject.overload)


def _in_use(call: Sample) -> dict[str, int]:
    device = call.device
    gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return {"bytes": _heap_bytes(), "Python objects": sys.getallocatedblocks(), "bytes of GPU memory": gpu}


class _MallocState(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def _mallinfo() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocState
    return function


def _heap_bytes() -> int:
    """Returns the bytes that are allocated and not freed: exact with glibc, else the process's largest size so far."""
    function = _mallinfo()
    if function is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = function()
    return int(state.uordblks + state.hblkhd)


# --- large sizes ------------------------------------------------------------------------------------------------------


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
