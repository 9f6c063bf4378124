"""Records cases with values that are apt to show a wrong kernel, where every right kernel gives the same answer.

Eager is the judge, so a case is kept only if its answer does not depend on how a right kernel rounds: eager takes the
values, is near its float64 reference, and answers the same when every operator rounds otherwise (ADR 0059).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import KeyPath, key_get

from exportkit.child.forked import in_fork
from exportkit.errors import ExportError, ModelRunError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.program_model import graphs_of
from exportkit.export.record.cases import case_sizes
from exportkit.export.record.eager_methods import DescribedModel
from exportkit.export.record.eager_run import EagerRun, run_eagerly
from exportkit.export.record.edge_values import kinds_of, kinds_of_rows, planned, with_edge_values
from exportkit.export.record.numerical_stability import ROUNDING, NumericalStability
from exportkit.export.record.record import MAX_CASES_BYTES, MAX_EDGE_CASE_BYTES, RecordedCase, record_run
from exportkit.export.record.sequences import DrawnCall, draw_calls, session_call, with_state
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.trace.index_inputs import index_inputs
from exportkit.export.trace.preflight import graph_operators
from exportkit.export.trace.traced import TracedMethod
from exportkit.package.manifest import PackagedMethod
from exportkit.progress import Progress
from exportkit.sizes import input_bytes
from exportkit.tensor_bytes import tensor_bytes

MAX_EDGE_CASES = 12
"""For each method without state, and for the sessions, at most so many."""

_LARGE_WEIGHTS = 256 << 20  # bytes; a model with more is called less often
_FEW = 3
_SECONDS = 60  # for a call of eager with custom operators
_TRIES = 2  # for each case that there may be: a try calls eager five times
_SIZES = 6
_SIZE_TRIES = 64  # calls, in which sizes that depend on data are looked for
_EDGES = (0, 1, 2)  # torch takes such a size for neither 0 nor 1 where it asks about broadcasting and layout
_SEEDS = 4
_SMALL_INPUTS = 1 << 15  # bytes of a call's inputs, if its sizes may vary
_SEED = 500_000  # apart from those of the drawn cases
_ILL_CONDITIONED = "numerically unstable in `{}`, as drawn values are ({})"
_ADVICE = (
    "in the spec, a Tolerance says how near is right; in 16 bits, from torch 2.13 on, --inductor-config "
    "emulate_precision_casts=True rounds each operator's result as eager does"
)

ArgumentPosition = tuple[str, int]
Chosen = Mapping[ArgumentPosition, str]


def edge_cases(
    model: DescribedModel,
    traced: Sequence[TracedMethod],
    drawn: Sequence[RecordedCase],
    options: TraceOptions,
    progress: Progress,
) -> tuple[RecordedCase, ...]:
    """Draws calls once more, gives them edge values, and records what eager answers to them."""
    if looping := [method.name for method in traced if _loops(method.program.graph_module)]:
        progress(f"no edge cases: a loop of {', '.join(looping)} may not end with them")
        return ()
    custom = any(graph_operators(method.program.graph_module) for method in traced)
    task = _Task(model, options.seed, index_inputs(model.eager, traced), custom)
    stateful = {method.name for method in with_state(model.methods)}
    units = [[method.name] for method in model.methods if not method.state] + ([sorted(stateful)] if stateful else [])
    spent = sum(len(case.tensors) for case in drawn)
    budget = max(MAX_CASES_BYTES - spent, MAX_EDGE_CASE_BYTES) // max(len(units), 1)
    kept: list[RecordedCase] = []
    left_out: Counter[str] = Counter()
    stability = NumericalStability(drawn)
    for unit in units:
        progress(f"recording edge values of {', '.join(unit)}")
        of_unit = [case for case in drawn if {call.method for call in case.calls} <= set(unit)]
        sized = [case for each in traced if [each.name] == unit for case in _of_sizes(task, stability, each, of_unit)]
        for case in itertools.chain(sized, _recorded(task, stability, of_unit, left_out)):
            if sum(len(each.tensors) for each in kept) + len(case.tensors) > budget * (1 + units.index(unit)):
                left_out["too large for the package"] += 1
            else:
                kept.append(case)
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    progress(f"{len(kept)} edge cases" + (f"; skipped: {reasons}" if reasons else ""))
    return tuple(kept)


@dataclass(frozen=True)
class _Task:
    """What draws the calls of edge cases.

    Attributes:
        index_inputs: The inputs of integers that must stay as they are drawn.
        custom: Whether the model calls custom operators, which values may lead to end the process.
    """

    model: DescribedModel
    seed: int
    index_inputs: frozenset[ArgumentPosition]
    custom: bool

    def run(self, calls: Sequence[DrawnCall]) -> EagerRun:
        """Lets eager answer calls."""
        if self.custom and self.model.device.type == "cpu":
            ended = in_fork(lambda: self._survived(calls), seconds=_SECONDS)
            if isinstance(ended, str):
                raise _EndedError(f"the eager model's process {ended}")
        try:
            return self._answered(calls)
        finally:
            self._check_gpu()

    def _check_gpu(self) -> None:
        """Refuses values with which a kernel ended the GPU's context, of which this process can ask nothing more."""
        if self.model.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.model.device)  # until then, nothing says so
        except RuntimeError as error:
            raise ModelRunError(
                "a kernel ended the GPU's context when it was given NaN, or another value that is tried: "
                + str(error).partition("\n")[0],
                hint="Let the model check what the kernel does not, or record no such values: --no-edge-cases.",
            ) from error

    def _survived(self, calls: Sequence[DrawnCall]) -> bytes:
        torch.set_num_threads(1)
        with suppress(ExportError, UsageError):
            self._answered(calls)
        return b""

    def _answered(self, calls: Sequence[DrawnCall]) -> EagerRun:
        eager_run = run_eagerly(self.model, calls)
        _ = eager_run.wide  # in its float64, too, a kernel may end the process
        return eager_run

    @property
    def most(self) -> int:
        weights = sum(tensor.nbytes for tensor in self.model.eager.spec.model.state_dict().values())
        return MAX_EDGE_CASES if weights <= _LARGE_WEIGHTS else _FEW

    def sizes(self, like: RecordedCase) -> list[dict[str, int]]:
        """Returns small sizes for cases of the same methods, the largest first: vector loops need some elements."""
        method = self._method(like)
        call = session_call(self.model.methods) if method.state else method.call
        example = {name: size for each in like.calls for name, size in each.sizes.items()}
        found = case_sizes(call, example, _SIZES, self.seed + _SEED, max_bytes=_SMALL_INPUTS)
        found.sort(key=lambda sizes: -input_bytes(call, sizes))
        small = [sizes for sizes in found if input_bytes(call, sizes) <= _SMALL_INPUTS]
        return small[: _SIZES // 2] or found[-1:]

    def draw(self, like: RecordedCase, sizes: Mapping[str, int], seed: int) -> list[DrawnCall]:
        """Draws calls like those of a case, on the CPU."""
        return draw_calls(self.model, self._method(like), sizes, seed)

    def _method(self, like: RecordedCase) -> PackagedMethod:
        return next(each for each in self.model.methods if each.name == like.calls[0].method)

    def kinds(
        self, calls: Sequence[DrawnCall], of_input: Callable[..., tuple[str, ...]] = kinds_of
    ) -> dict[ArgumentPosition, tuple[str, ...]]:
        """Returns by input the kinds that it can have in all calls."""
        found: dict[ArgumentPosition, tuple[str, ...]] = {}
        for call in calls:
            for index, tensor in enumerate(call.bound.tensors):
                position = call.method, index
                known = of_input(tensor, keep_integers=position in self.index_inputs)
                found[position] = tuple(kind for kind in found.get(position, known) if kind in known)
        return {position: kinds for position, kinds in found.items() if kinds}

    def with_edge_values(self, calls: Sequence[DrawnCall], chosen: Chosen, seed: int) -> list[DrawnCall]:
        """Returns the calls with these kinds of edge values."""
        generator = torch.Generator().manual_seed(seed)
        changed = []
        for call in calls:
            tensors = tuple(
                with_edge_values(chosen[position], tensor, generator)
                if (position := (call.method, index)) in chosen
                else tensor
                for index, tensor in enumerate(call.bound.tensors)
            )
            changed.append(replace(call, bound=self.model.eager.bind(call.method, *call.bound.with_tensors(tensors))))
        return changed

    def name(self, calls: Sequence[DrawnCall], chosen: Chosen) -> str:
        """Returns such as "ties in x, NaN in y"; of many inputs, the first ones."""
        names = {(call.method, i): name for call in calls for i, name in enumerate(call.bound.names)}
        texts = [f"{kind} in {names[position]}" for position, kind in chosen.items()]
        if len(texts) > 4:
            texts = [*texts[:3], f"... {len(texts)} inputs"]
        return ", ".join(texts)


class _EndedError(ExportError):
    """Values ended the process in which eager was given them."""


def _of_sizes(
    task: _Task, stability: NumericalStability, method: TracedMethod, drawn: Sequence[RecordedCase]
) -> Iterator[RecordedCase]:
    """Yields steady cases of a method in which the sizes that depend on data are 0, 1, 2 and the greatest."""
    if not drawn or not (sizes := _data_sizes(method)):
        return
    largest = task.sizes(drawn[0])[0]
    try:
        task.draw(drawn[0], largest, task.seed)
    except (ExportError, UsageError):  # the spec's function does not draw them
        return
    seen: set[str] = set()
    for reaching in _reaching(task, sizes, lambda seed: task.draw(drawn[0], largest, task.seed + _SEED + seed)):
        for calls, chosen in reaching[:_TRIES]:
            if (digest := _digest(calls)) in seen:
                break
            seen.add(digest)
            case = _stable(task, stability, calls, task.name(calls, chosen))
            if isinstance(case, RecordedCase):
                yield case
                break


@dataclass(frozen=True)
class _DataSize:
    """A size of an operator's result that depends on data.

    Attributes:
        operator: The operator.
        number: Which of the method's calls of this operator, from 0.
        path: Where the size is in its result.
    """

    operator: torch._ops.OpOverload
    number: int
    path: KeyPath


def _data_sizes(method: TracedMethod) -> list[_DataSize]:
    """Returns the sizes that operators of a method find in data, in the order of its calls."""
    counts: Counter[object] = Counter()
    found = []
    for node in method.program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        paths = (node.meta.get("unbacked_bindings") or {}).values()
        sizes = [path for path in paths if any(getattr(key, "name", "") == "size" for key in path)]
        found += [_DataSize(node.target, counts[node.target], path) for path in sizes]
        counts[node.target] += 1
    return found


def _reaching(
    task: _Task, sizes: Sequence[_DataSize], draw: Callable[[int], list[DrawnCall]]
) -> Iterator[list[tuple[list[DrawnCall], Chosen]]]:
    """Yields for each edge of each size the calls that reach it, those with the fewest changes first."""
    reached: dict[tuple[int, int], list[tuple[list[DrawnCall], Chosen]]] = defaultdict(list)
    for seed, chosen in itertools.islice(_plans(task.kinds(draw(0), kinds_of_rows)), _SIZE_TRIES):
        seen = _Sizes(sizes)
        try:
            calls = draw(seed)
            calls = task.with_edge_values(calls, chosen, seed) if chosen else calls
            with watched_by(seen):
                task.run(calls)
        except (ExportError, UsageError):
            continue
        for position, size in seen.found.items():
            reached[position, size].append((calls, chosen))
    for position in range(len(sizes)):
        found = sorted(size for known, size in reached if known == position)
        for size in dict.fromkeys((*_EDGES, *found[-1:])):
            if (position, size) in reached:
                yield reached[position, size]


def _plans(kinds: Mapping[ArgumentPosition, Sequence[str]]) -> Iterator[tuple[int, dict[ArgumentPosition, str]]]:
    """Yields seeds and kinds: as drawn, one input changed, then two, with another seed each time."""
    yield from ((seed, {}) for seed in range(_SEEDS))
    seed = _SEEDS
    for changed in range(1, min(len(kinds), 2) + 1):
        for positions in itertools.combinations(kinds, changed):
            for chosen in itertools.product(*(kinds[position] for position in positions)):
                yield seed, dict(zip(positions, chosen))
                seed += 1


class _Sizes(OperatorMode):
    """Notes the sizes that operators find."""

    def __init__(self, wanted: Sequence[_DataSize]) -> None:
        super().__init__()
        self._wanted = wanted
        self._counts: Counter[object] = Counter()
        self.found: dict[int, int] = {}

    def operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        answer = func(*args, **kwargs)
        for position, each in enumerate(self._wanted):
            if each.operator is func and each.number == self._counts[func]:
                self.found[position] = int(key_get(answer, each.path))
        self._counts[func] += 1
        return answer


def _recorded(
    task: _Task, stability: NumericalStability, drawn: Sequence[RecordedCase], left_out: Counter[str]
) -> Iterator[RecordedCase]:
    """Yields the steady cases of one method, or of sessions. Where inputs together are not, each is tried alone."""
    if not drawn:
        return
    sizes, seen, found, tries, compared = task.sizes(drawn[0]), set[str](), 0, 0, False
    most = task.most
    for number in range(most):
        try:
            calls = task.draw(drawn[0], sizes[number % len(sizes)], task.seed + _SEED + number)
        except (ExportError, UsageError):  # the drawn cases have other sizes, which the spec's function could draw
            left_out["that the spec's function does not draw"] += 1
            continue
        kinds = task.kinds(calls)
        plan = planned(kinds, most)
        if number >= len(plan):
            break
        together = plan[number]
        alone = [{position: kind} for position, kind in together.items()] if len(together) > 1 else []
        for chosen in (together, *alone):
            changed = task.with_edge_values(calls, chosen, number)
            if found == most or (digest := _digest(changed)) in seen or digest == _digest(calls):
                continue
            if tries == _TRIES * most:
                left_out["that were too many to try"] += len(plan) - number
                return
            seen.add(digest)
            tries += 1
            case = _stable(task, stability, changed, task.name(calls, chosen))
            if case == ROUNDING and not compared:
                compared = True
                if _stable(task, stability, calls, "") == ROUNDING:
                    left_out[_ILL_CONDITIONED.format(stability.unstable, _ADVICE)] += len(plan) - number
                    return
            if isinstance(case, RecordedCase):
                found += 1
                yield case
                if chosen is together:
                    break
            elif chosen is not together or not alone:
                left_out[case] += 1


def _stable(task: _Task, stability: NumericalStability, calls: Sequence[DrawnCall], name: str) -> RecordedCase | str:
    """Records a case of calls, or says why it cannot be one."""
    try:
        eager_run = task.run(calls)
    except _EndedError:
        return "that end eager's process"
    except (ExportError, UsageError):
        return "that eager refuses"
    case = record_run(eager_run, edge_case=name)
    return stability.problem(eager_run, case) or case


def _loops(module: torch.fx.GraphModule) -> bool:
    """Whether a graph, or one within it, repeats something until a value is right: with NaN or infinity it never is."""
    nodes = (node for part in graphs_of(module) for node in part.graph.nodes)
    return any(getattr(node.target, "__name__", "") == "while_loop" for node in nodes)


def _digest(calls: Sequence[DrawnCall]) -> str:
    digest = hashlib.sha256()
    for call in calls:
        for tensor in call.bound.tensors:
            digest.update(tensor_bytes(tensor).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
