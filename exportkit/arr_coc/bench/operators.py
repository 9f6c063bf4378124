"""Times operators and their alternatives: the eager reference, the compiled reference, and library functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.arr_coc.bench.problem_sizes import Benchmark, TimedOperator, subjects
from exportkit.bench.operator_options import COMPILE, EAGER, LIBRARY, OperatorOptions
from exportkit.bench.results import OURS, Direction, Measurement, Row
from exportkit.bench.timing import Alternative, Call, measure
from exportkit.errors import UsageError, WrongResultError
from exportkit.progress import Progress

# Tolerances of gradients and library results, relative to the reference's norm: orders of summation differ.
_NORMWISE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_OTHERS_AGREEMENT = 0.97  # of elements; a library may break ties in another way
_MAX_SETS = 16
_CPU_CACHE = 16 << 20  # bytes, a typical third-level cache of a few cores


def operator_names() -> list[str]:
    """Returns the names of what can be timed."""
    return list(subjects(torch.device("cpu")))


def bench_operators(
    device: torch.device, rate: Callable[[], float], options: OperatorOptions, progress: Progress
) -> Iterator[Row]:
    """Times operators, row by row. `rate` returns the GB/s of a large copy on the device.

    Raises:
        UsageError: A name or a size is unknown.
        WrongResultError: An operator's result or gradient differs from the reference's. It is not timed.
    """
    for subject, benchmark, dtype, direction in _chosen(subjects(device), options):
        of_copies = rate()
        progress(f"{subject.name} {benchmark.size} {str(dtype)[6:]} {direction}")
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            yield _row(subject, benchmark, dtype, direction, device, of_copies, options)


def _chosen(
    found: dict[str, TimedOperator], options: OperatorOptions
) -> list[tuple[TimedOperator, Benchmark, torch.dtype, Direction]]:
    if unknown := [name for name in options.names if name not in found]:
        said = f"there is no operator {unknown[0]!r} to time"
        raise UsageError(said, hint=f"The operators are {', '.join(found)}. A package's name ends in .pt2.")
    chosen = [
        (subject, benchmark, options.dtype or benchmark.dtype, direction)
        for name in options.names or found
        for subject in [found[name]]
        for benchmark in subject.benchmarks
        for direction in options.directions
        if (direction == "forward" or subject.differentiable)
        and (not options.sizes or any(size in benchmark.size for size in options.sizes))
    ]
    if not chosen:
        sizes = {benchmark.size for name in options.names or found for benchmark in found[name].benchmarks}
        names, directions = ", ".join(options.names) or "no operator", " or ".join(options.directions)
        if not options.sizes:
            raise UsageError(f"nothing to time: {names} has no {directions}", hint="Time the other direction.")
        said = f"nothing to time: {names} has no {directions} of size {' or '.join(options.sizes)}"
        raise UsageError(said, hint=f"The sizes are {'; '.join(sorted(sizes))}.")
    return chosen


def _row(
    subject: TimedOperator,
    benchmark: Benchmark,
    dtype: torch.dtype,
    direction: Direction,
    device: torch.device,
    rate: float,
    options: OperatorOptions,
) -> Row:
    task = (_Forward if direction == "forward" else _Backward)(subject, benchmark, dtype, device)
    expected = task.run(subject.reference)
    _check(task, expected, task.run(subject.function))
    moved = task.moved_bytes(expected)
    ready = [Alternative(OURS, f"arr_coc::{subject.name}", task.calls(subject.function))]
    failed: list[Measurement] = []
    with ExitStack() as stack:
        if direction == "forward":
            stack.enter_context(torch.no_grad())
        else:  # a graph that is kept for the next call
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        for name, what, function, missing in _others(subject, benchmark, options.against):
            reason = missing or _disagreement(task, function, expected)
            if reason is not None:
                failed.append(Measurement(name, what, note=reason))
                continue
            ready.append(Alternative(name, what, task.calls(function)))
        del expected
        measured = measure(ready, device, options.seconds)
    return Row(
        subject=subject.name,
        size=benchmark.size,
        dtype=str(dtype).removeprefix("torch."),
        direction=direction,
        moved_bytes=moved,
        limit=moved / rate / 1e6,
        measurements=(*measured, *failed),
    )


def _others(
    subject: TimedOperator, benchmark: Benchmark, against: Sequence[str]
) -> Iterator[tuple[str, str, Callable[..., Any], str | None]]:
    """Yields (name, description, function, why it cannot be timed here) of the alternatives."""
    if EAGER in against:
        yield EAGER, "the ATen reference", subject.reference, None
    if COMPILE in against:
        torch._dynamo.reset()  # otherwise the next size would be compiled with dynamic shapes
        compiled = torch.compile(subject.reference, fullgraph=True, dynamic=False)
        yield COMPILE, "torch.compile of the reference", compiled, None
    if LIBRARY in against and (library := benchmark.library) is not None:
        yield LIBRARY, library.what, library.function, library.missing


# --- calls ------------------------------------------------------------------------------------------------------------


class _Forward:
    """Calls of a function on inputs that are drawn once. Caches cannot hold all sets of inputs."""

    direction: Direction = "forward"

    def __init__(self, subject: TimedOperator, benchmark: Benchmark, dtype: torch.dtype, device: torch.device) -> None:
        self.subject, self.benchmark, self.dtype, self.device = subject, benchmark, dtype, device
        first = benchmark.draw(device, dtype)
        count = min(_MAX_SETS, math.ceil(4 * _cache_bytes(device) / max(1, _bytes(first))))
        self.inputs = [first, *(benchmark.draw(device, dtype) for _ in range(count - 1))]

    def run(self, function: Callable[..., Any]) -> list[Tensor]:
        """Returns the function's results for the first inputs, or the tensors that it wrote to."""
        args, kwargs = tree_map_only(Tensor, torch.clone, self.inputs[0])
        with torch.no_grad():
            result = function(*args, **kwargs)
        self.writes = result is None
        return _tensors((args, kwargs) if self.writes else result)

    def calls(self, function: Callable[..., Any]) -> list[Call]:
        """Returns a call for each set of inputs."""
        return [partial(function, *args, **kwargs) for args, kwargs in self.inputs]

    def moved_bytes(self, outputs: Sequence[Tensor]) -> int:
        """Returns the bytes that one call must move."""
        if (moved := self.benchmark.moved) is not None:
            return moved.elements * self.dtype.itemsize + moved.beside
        return _bytes(self.inputs[0]) + (0 if self.writes else _bytes(outputs))


class _Backward(_Forward):
    """Gradients with respect to the differentiable inputs. The forward call runs beforehand, once per function."""

    direction: Direction = "backward"

    def __init__(self, subject: TimedOperator, benchmark: Benchmark, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(subject, benchmark, dtype, device)
        del self.inputs[4:]  # every set keeps the tensors that the reference saves for its gradient
        names = list(inspect.signature(subject.reference).parameters)
        self.places = [names.index(name) for name in subject.differentiable if names.index(name) < len(benchmark.args)]
        with torch.no_grad():
            outputs = _tensors(subject.function(*self.inputs[0][0], **self.inputs[0][1]))
        self.upstream = [
            torch.randn(out.shape, device=device).to(out.dtype) for out in outputs if out.is_floating_point()
        ]

    def run(self, function: Callable[..., Any]) -> list[Tensor]:
        """Returns the gradients for the first inputs."""
        return list(self._gradient(function, *self.inputs[0])())

    def calls(self, function: Callable[..., Any]) -> list[Call]:
        """Returns a call for each set of inputs."""
        return [self._gradient(function, args, kwargs) for args, kwargs in self.inputs]

    def moved_bytes(self, outputs: Sequence[Tensor]) -> int:
        """Returns the bytes to move: the inputs and the outputs' gradients in, the inputs' gradients out."""
        if (moved := self.benchmark.moved_backward) is not None:
            return moved.elements * self.dtype.itemsize + moved.beside
        return 2 * _bytes(outputs) + _bytes(self.upstream)

    def _gradient(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [args[place].detach().requires_grad_() for place in self.places]
        arguments = list(args)
        for place, leaf in zip(self.places, leaves):
            arguments[place] = leaf
        outputs = [out for out in _tensors(function(*arguments, **kwargs)) if out.is_floating_point()]
        pairs = [(out, grad) for out, grad in zip(outputs, self.upstream) if out.requires_grad]
        outputs, upstream = [out for out, _ in pairs], [grad for _, grad in pairs]
        return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return _CPU_CACHE


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))


# --- nothing wrong is timed -------------------------------------------------------------------------------------------


def _check(task: _Forward, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
    """Compares an operator's results with the reference's. WrongResultError: they differ."""
    for problem in _problems(task, expected, actual):
        said = f"{task.subject.name} {task.direction} at {task.benchmark.size} in {str(task.dtype)[6:]}: {problem}"
        raise WrongResultError(said, hint="It was not timed. `pytest tests/arr_coc/ops` shows details.")


def _problems(task: _Forward, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> Iterator[str]:
    returned, wanted = ([f"{str(t.dtype)[6:]} {list(t.shape)}" for t in some] for some in (actual, expected))
    if returned != wanted:
        yield f"it returns {', '.join(returned)}; its reference {', '.join(wanted)}"
    for number, (want, got) in enumerate(zip(expected, actual)):
        if task.direction == "backward":
            error, allowed = _normwise(want, got), _NORMWISE[task.dtype]
            if not error <= allowed:
                yield f"gradient {number} is {error:.2g} of its norm away from the reference's; {allowed:g} is allowed"
        elif (agree := _agreement(want, got, *task.subject.tolerance(want.dtype))) < task.benchmark.agreement:
            yield f"{1 - agree:.2%} of output {number} is not within tolerance of the reference's"


def _disagreement(task: _Forward, function: Callable[..., Any], expected: Sequence[Tensor]) -> str | None:
    """Returns how an alternative's results differ; None if they agree."""
    try:
        actual = task.run(function)
    except Exception as error:  # an error of a compiler or a library is a result of the comparison
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        return "its results have different shapes"
    rtol = _NORMWISE[task.dtype]
    for want, got in zip(expected, actual):
        if want.is_floating_point():
            atol = rtol * want.abs().mean(dtype=torch.float32).item()
        else:
            atol = float(want.dtype == torch.int8)  # a quantised value may differ by one step due to rounding
        agree = _agreement(want, got, rtol, atol)
        if agree < _OTHERS_AGREEMENT:
            return f"{1 - agree:.2%} of its results differ"
    return None


def _agreement(expected: Tensor, actual: Tensor, rtol: float, atol: float) -> float:
    """Returns the share of elements within tolerance; 1 if there are no elements."""
    if not expected.numel():
        return 1.0
    if not expected.is_floating_point() and not atol:
        return (expected == actual).float().mean().item()
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    close = torch.isclose(actual.to(wide), expected.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    return 1 - (close.numel() - int(close.sum())) / close.numel()


def _normwise(expected: Tensor, actual: Tensor) -> float:
    """Returns |actual - expected| / |expected|; NaN stays."""
    difference = torch.linalg.vector_norm((actual.double() - expected.double()).flatten())
    return (difference / torch.linalg.vector_norm(expected.double().flatten()).clamp(min=1e-30)).item()
