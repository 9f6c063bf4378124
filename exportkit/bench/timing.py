"""Times calls.

The alternatives take turns, sample by sample, so that drift (clocks, temperature, other programs) affects all of them.
Inputs rotate, so that caches hold no more of them than in real use.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.bench.results import Measurement, Timing

Call = Callable[[], object]
Within = Callable[[], AbstractContextManager[Any]]

_MIN_SAMPLES, _MAX_SAMPLES = 5, 200
_SHORTEST_SAMPLE = 200e-6  # seconds; several shorter calls are timed together
_GRAPH_CALLS = 20  # the least number in a CUDA graph, so that the launch of the graph does not matter


@dataclass(frozen=True)
class Alternative:
    """One way to do the work: one call for each set of inputs, all equal in cost.

    Not timed are entering a context that the calls need, and what each call needs before it, such as the state that it
    begins with.
    """

    name: str
    what: str
    calls: Sequence[Call]
    within: Within = nullcontext
    before: Call | None = None


def measure(
    alternatives: Sequence[Alternative], device: torch.device, seconds: float, *, graphs: bool = True
) -> list[Measurement]:
    """Times alternatives in turns. A first call, which must succeed, warms each up.

    Each gets about so many seconds, and a few samples even if they take longer. On CUDA, `graphs` also replays the
    calls from a CUDA graph, which times the kernels without Python's launches.
    """
    if device.type == "cuda":
        return _measure_cuda(alternatives, seconds, graphs)
    _warm_up(alternatives)
    timings = _take_turns(_cpu_samplers(alternatives), seconds)
    return [
        Measurement(alternative.name, alternative.what, call=timing, peak_bytes=_cpu_peak(alternative))
        for alternative, timing in zip(alternatives, timings)
    ]


def copy_rate(device: torch.device) -> float:
    """Returns the GB/s of a large copy (bytes read plus bytes written), the limit for code that only moves memory.

    This is the faster of a copy by the driver or C library and a kernel that multiplies by 1.
    """
    size = (1 << 32) if device.type == "cuda" else (1 << 28)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copies = [
        Alternative("copy", "Tensor.copy_", [lambda: target.copy_(source)]),
        Alternative("kernel", "torch.mul", [lambda: torch.mul(source, 1.0, out=target)]),
    ]
    _warm_up(copies)
    samplers = [_event_sampler(copy) for copy in copies] if device.type == "cuda" else _cpu_samplers(copies)
    return 2 * size / min(timing.median for timing in _take_turns(samplers, 0.5)) / 1e6


def _take_turns(samplers: Sequence[Callable[[], float]], seconds: float) -> list[Timing]:
    """Returns milliseconds of each sampler. Each round takes one sample of each, in random order.

    In a fixed order, each sampler would always find the caches and the heap as left by the same other sampler.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    turns, order = random.Random(0), list(range(len(samplers)))
    end = time.perf_counter() + seconds * len(samplers)
    for round_ in range(_MAX_SAMPLES):
        if round_ >= _MIN_SAMPLES and time.perf_counter() > end:
            break
        turns.shuffle(order)
        for turn in order:
            samples[turn].append(samplers[turn]())
    return [_timing(found) for found in samples]


def _timing(samples: Sequence[float]) -> Timing:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, q1, q3, len(samples))


def _warm_up(alternatives: Sequence[Alternative]) -> None:
    for alternative in alternatives:
        with alternative.within():
            for call in alternative.calls:
                _prepare(alternative)
                call()


def _prepare(alternative: Alternative) -> None:
    if alternative.before is not None:
        alternative.before()


# --- CPU --------------------------------------------------------------------------------------------------------------


def _cpu_samplers(alternatives: Sequence[Alternative]) -> list[Callable[[], float]]:
    """Makes samplers with equal numbers of calls, because another alternative's caches slow down the first call."""
    repeats = max(1, round(_SHORTEST_SAMPLE / min(map(_cpu_estimate, alternatives))))
    return [_cpu_sampler(alternative, repeats) for alternative in alternatives]


def _cpu_estimate(alternative: Alternative) -> float:
    """Returns the approximate seconds of a call."""
    with alternative.within():
        _prepare(alternative)
        start = time.perf_counter()
        alternative.calls[0]()
        return time.perf_counter() - start


def _cpu_sampler(alternative: Alternative, repeats: int) -> Callable[[], float]:
    turn = 0

    def sample() -> float:
        nonlocal turn
        calls = [alternative.calls[(turn + i) % len(alternative.calls)] for i in range(repeats)]
        turn += repeats
        with alternative.within():
            if alternative.before is not None:
                return sum(_prepared_seconds(alternative.before, call) for call in calls) / repeats * 1e3
            begin = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - begin) / repeats * 1e3

    return sample


def _prepared_seconds(before: Call, call: Call) -> float:
    before()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _cpu_peak(alternative: Alternative) -> int:
    """Returns the peak of the bytes allocated by torch's CPU allocator during a call."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    )
    with alternative.within():
        _prepare(alternative)
        with profiler as profile:
            output = alternative.calls[0]()
    assert profile.profiler is not None
    allocated = greatest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            allocated += event.nbytes()
            greatest = max(greatest, allocated)
    del output
    return greatest


# --- CUDA -------------------------------------------------------------------------------------------------------------


def _measure_cuda(alternatives: Sequence[Alternative], seconds: float, graphs: bool) -> list[Measurement]:
    """Times calls with events, then the same calls replayed from CUDA graphs."""
    _warm_up(alternatives)
    calls = _take_turns([_event_sampler(alternative) for alternative in alternatives], seconds / 2)
    captured: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    notes: dict[str, str] = {}
    for alternative, timing in zip(alternatives, calls) if graphs else ():
        try:
            captured[alternative.name] = _capture(alternative, timing.median)
        except RuntimeError as error:
            _end_capture_of_random_numbers()
            notes[alternative.name] = f"no CUDA graph: {str(error).partition(chr(10))[0]}"
    replays = [_replay_sampler(graph, count) for graph, count in captured.values()]
    kernels = dict(zip(captured, _take_turns(replays, seconds / 2))) if replays else {}
    return [
        Measurement(
            alternative.name,
            alternative.what,
            call=timing,
            kernels=kernels.get(alternative.name),
            peak_bytes=_cuda_peak(alternative),
            note=notes.get(alternative.name),
        )
        for alternative, timing in zip(alternatives, calls)
    ]


def _event_sampler(alternative: Alternative) -> Callable[[], float]:
    turn = 0

    def sample() -> float:
        nonlocal turn
        call = alternative.calls[turn % len(alternative.calls)]
        turn += 1
        with alternative.within():
            _prepare(alternative)
            return _event_ms(call)

    return sample


def _event_ms(call: Call) -> float:
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _capture(alternative: Alternative, milliseconds: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """Returns a graph of calls that rotate through all inputs, and their number. Long calls need only one round."""
    count = len(alternative.calls)
    if milliseconds < 1:
        count *= -(-_GRAPH_CALLS // count)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        # Uses the stream of the recorded forward calls, because gradients run on their forward call's stream.
        with alternative.within(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for i in range(count):
                alternative.calls[i % len(alternative.calls)]()
    finally:
        torch.cuda.synchronize()
    return graph, count


def _end_capture_of_random_numbers() -> None:
    """Gives the GPU's generator a new state: after a capture that failed, torch refuses to draw with the old one."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _replay_sampler(graph: torch.cuda.CUDAGraph, count: int) -> Callable[[], float]:
    return lambda: _event_ms(graph.replay) / count


def _cuda_peak(alternative: Alternative) -> int:
    with alternative.within():
        _prepare(alternative)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = alternative.calls[0]()
    torch.cuda.synchronize()
    del output
    return torch.cuda.max_memory_allocated() - before
