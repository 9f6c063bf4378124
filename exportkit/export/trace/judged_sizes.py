"""Traces a model for all declared sizes, and lets eager judge the conditions on sizes that a trace was made under.

A condition that fails for declared sizes is no reason to refuse them: the traced program often answers rightly there,
as where it pads by nothing (docs/adr/0080).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from exportkit.errors import OperatorNotExportableError
from exportkit.export.models.call_signature import BoundCall, describe_call
from exportkit.export.models.program_model import STATE
from exportkit.export.models.source_lines import users_code
from exportkit.export.record.cases import eager_mode, resampled
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.sizes.guards import GuardLog
from exportkit.export.sizes.shapes import DynamicSizes, linear_in_one
from exportkit.export.sizes.tried_sizes import holds_at
from exportkit.export.trace.hop_subgraphs import correct_branches
from exportkit.export.trace.preflight import check_fake
from exportkit.export.trace.repeatable import agree
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask, call_export
from exportkit.libraries import TORCH_NAMESPACES
from exportkit.package.structure import plain
from exportkit.progress import Progress, silent
from exportkit.sizes import label_of
from exportkit.spec import FORWARD

TRACES = 5
"""From so many example sizes a model is traced at most."""

_TRIES = 16  # sizes at which one trace is held against eager
_MOST = 4_000_000  # numbers in the inputs of one, unless the example has more

Sizes = Mapping[str, int]


def export_judged(
    task: TracingTask, sizes: DynamicSizes, traces: int = TRACES, progress: Progress = silent
) -> tuple[torch.export.ExportedProgram, tuple[Sizes, ...]]:
    """Traces a model for all declared sizes.

    Where a condition of the trace fails for some of them, the program must answer what eager answers on both sides of
    it. If it does not, the model is traced from an example of the other side, whose program may do for all.

    Returns:
        The program, and the sizes at which it was tried.

    Raises:
        RefusedByTorchError: torch.export refused the model, or no program answers what eager answers everywhere.
    """
    judge = _Judge(task, sizes, progress)
    waiting: list[Sizes] = [sizes.example]
    seen: list[Sizes] = []
    while waiting and len(seen) < traces and not judge.illegal:
        seen.append(waiting.pop(0))
        try:
            program, log = judge.traced_from(seen[-1])
        except RefusedByTorchError:
            if len(seen) == 1:
                raise
            continue  # what torch refuses there is no reason to refuse the first example
        wrong = judge.wrong(program, log)
        if not wrong and not judge.illegal:
            return program, tuple(judge.tried)
        waiting = [each for each in (*wrong, *waiting) if each not in seen and judge.can_be_example(each)]
    raise judge.refusal()


@dataclass
class _Judge:
    """Traces from an example, and holds programs against eager.

    Attributes:
        tried: The sizes at which all programs are tried.
        illegal: Whether eager refuses declared sizes.
        _log: The conditions of the first trace.
        _failing: Which conditions of the first trace fail at each size, and whether its program was right there.
    """

    task: TracingTask
    sizes: DynamicSizes
    progress: Progress
    tried: list[Sizes] = field(default_factory=list)
    illegal: bool = False
    _log: GuardLog | None = None
    _failing: list[tuple[Sequence[sympy.Basic], bool]] = field(default_factory=list)
    _answers: dict[str, list[torch.Tensor] | None] = field(default_factory=dict)
    _said: list[str] = field(default_factory=list)

    def traced_from(self, example: Sizes) -> tuple[torch.export.ExportedProgram, GuardLog]:
        """Traces the model from an example of these sizes. Returns the program and the conditions of the trace."""
        task, sizes = self.task, self.sizes
        if example != sizes.example:
            self.progress(f"tracing from {label_of(example)}")
            task, sizes = replace(task, bound=self._drawn(example)), replace(sizes, example=example)
        program, log = call_export(torch.export.export, task, sizes)
        self._log = self._log or log
        correct_branches(program)
        log.drop_untrue(program)
        return program, log

    def wrong(self, program: torch.export.ExportedProgram, log: GuardLog) -> list[Sizes]:
        """Returns the sizes at which a program does not answer what eager answers, and where it says most first."""
        run, conditions, example = _DescribedRun(program), log.hypotheses(), log.declared.example
        beside = [[each for each in log.declared.beside(c) if self._fits(each)] for c in conditions]
        added = [each for each in _in_turn(beside) if each not in self.tried][:_TRIES]
        wrong = []
        if added:
            self.progress(f"holding the program against eager at {len(added) + len(self.tried)} sizes")
        for values in [*added, *self.tried]:
            failing = [c for c in conditions if not holds_at(c, {s: values[s.name] for s in c.free_symbols})]
            expected = self._expected(values, failing)
            problem = None if expected is None else self._problem(run, values, expected)
            if problem:
                wrong.append(values)
                self._said.append(f"traced at {label_of(example)}, it {problem} at {label_of(values)}")
            if example == self.sizes.example:
                self._failing.append((failing, expected is not None and not problem))
        self.tried += [each for each in added if self._answers[label_of(each)] is not None]
        return wrong

    def can_be_example(self, values: Sizes) -> bool:
        """Returns whether torch.export takes an example of these sizes: those below 2 are constants for it."""
        return all(size.at(values) >= 2 for size in self.sizes.by_axis.values())

    def refusal(self) -> RefusedByTorchError:
        """Returns why no program does, in conditions of the first trace: without those that fail where it is right."""
        harmless = {each for failing, right in self._failing if right for each in failing}
        for failing, right in self._failing:
            if not right and harmless.issuperset(failing):
                harmless.difference_update(failing)  # together they are not
        assert self._log is not None
        log = replace(self._log, assumed=harmless)
        names = sorted({symbol.name for each in log.refuted() for symbol in each.free_symbols} or self.sizes.example)
        error = ValueError(f"Constraints violated ({', '.join(names)})!")
        return RefusedByTorchError(error, self.sizes, log, tuple(self._said))

    def _expected(self, values: Sizes, failing: Sequence[sympy.Basic]) -> list[torch.Tensor] | None:
        """Returns what eager answers; None if it refuses these sizes, or no inputs of them can be drawn."""
        label = label_of(values)
        if label not in self._answers:
            try:
                self._answers[label] = self._eager(values)
            except Exception as error:  # eager raises what the model raises
                self._answers[label] = None
                # Sizes that only together are none that a call may have are no reason to refuse the others.
                if any(isinstance(each, sympy.Eq) or len(each.free_symbols) == 1 for each in failing):
                    self.illegal = True
                    said = str(error).strip().partition("\n")[0]
                    self._said.append(f"eager raises {type(error).__name__} at {label}: {said}")
        return self._answers[label]

    def _eager(self, values: Sizes) -> list[torch.Tensor]:
        session = self._methods.session(values)
        with eager_mode():
            answer = session.call(FORWARD, self._drawn(values))
        return [*answer.outputs, *answer.written.values(), *session.state.values()]

    def _problem(self, run: _DescribedRun, values: Sizes, expected: Sequence[torch.Tensor]) -> str | None:
        """Returns what is wrong with a program's answer; None if nothing is."""
        bound = self._drawn(values)
        tensors = tuple(tensor.clone() for tensor in bound.tensors)
        args, kwargs = bound.with_tensors(tensors)
        state = [buffer.at(values) for buffer in self.task.state]
        try:
            with eager_mode():
                results = run.results(plain(args), plain(kwargs), state)
        except _OtherSizesError:
            return "computes with other sizes than eager"
        except OperatorNotExportableError:
            raise
        except Exception as error:  # a program raises what its operators raise
            return f"raises {type(error).__name__}"
        written = self._methods.written(FORWARD, bound)
        found = [*results, *(t for name, t in zip(bound.names, tensors) if name in written), *state]
        for one, other in zip(found, expected, strict=True):
            if one.shape != other.shape:
                return "answers other sizes than eager"
            if self.task.repeats and not agree(one, other):
                return "answers other values than eager"
        return None

    @functools.cached_property
    def _methods(self) -> EagerMethods:
        return EagerMethods(self.task.spec)

    def _drawn(self, values: Sizes) -> BoundCall:
        """Returns a call of these sizes, on the device and in the dtypes of the example."""
        bound = self.task.bound
        if values == self.sizes.example:
            return bound
        generator = torch.Generator().manual_seed(0)
        if self.task.spec.draw_inputs is not None:
            with users_code(f"the spec's draw_inputs at {label_of(values)}"):
                bound = describe_call(self.task.spec.model, *self.task.spec.draw_inputs(values, generator))
        shapes = self._shapes(values)
        tensors = [resampled(tensor, shape, generator) for tensor, shape in zip(bound.tensors, shapes, strict=True)]
        placed = tuple(tensor.to(like.device, like.dtype) for tensor, like in zip(tensors, self.task.bound.tensors))
        return describe_call(self.task.spec.model, *bound.with_tensors(placed))

    def _fits(self, values: Sizes) -> bool:
        numbers, examples = (sum(map(math.prod, self._shapes(each))) for each in (values, self.sizes.example))
        return numbers <= max(_MOST, examples)

    def _shapes(self, values: Sizes) -> list[list[int]]:
        """Returns the shapes of the inputs for these values of the names."""
        return [
            [size.at(values) if (size := self.sizes.at(name, dim)) else given for dim, given in enumerate(example)]
            for name, example in self.task.examples.items()
        ]


def _in_turn(lists: Iterable[Sequence[Sizes]]) -> list[Sizes]:
    """Returns the first of each list, then the second of each, and so on; each once."""
    found: list[Sizes] = []
    for each in itertools.chain.from_iterable(itertools.zip_longest(*lists)):
        if each is not None and each not in found:
            found.append(each)
    return found


class _OtherSizesError(Exception):
    """A node's result has other sizes than tracing described, so that compiled code would be wrong."""


class _DescribedRun(torch.fx.Interpreter):
    """Runs a traced program, and holds the sizes of each result against those that tracing has described."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__(program.module(check_guards=False))
        self._sizes: dict[sympy.Expr, sympy.Expr] = {}
        self._symbols: dict[sympy.Symbol, sympy.Integer] = {}

    def results(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the tensors of the program's result. It writes into the state."""
        self._sizes, self._symbols = {}, {}
        given = tree_leaves((args, {**kwargs, **({STATE: tuple(state)} if state else {})}))
        return [t for t in tree_leaves(self.run(*given, enable_io_processing=False)) if isinstance(t, torch.Tensor)]

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node."""
        result = super().run_node(n)
        for described, tensor in zip(tree_leaves(n.meta.get("val")), tree_leaves(result)):
            if not (isinstance(described, torch.Tensor) and isinstance(tensor, torch.Tensor)):
                continue
            if n.op == "placeholder":
                self._learn(described, tensor)
            elif described.ndim != tensor.ndim or any(map(self._differs, described.shape, tensor.shape)):
                if isinstance(n.target, OpOverload) and n.target.namespace not in TORCH_NAMESPACES:
                    check_fake(n.target, "", *self.fetch_args_kwargs_from_env(n), result)
                raise _OtherSizesError(f"{n.target} answers {list(tensor.shape)} for {list(described.shape)}")
        return result

    def _learn(self, described: torch.Tensor, tensor: torch.Tensor) -> None:
        for size, actual in zip(described.shape, tensor.shape):
            if isinstance(size, torch.SymInt) and (linear := linear_in_one(size.node.expr)):
                symbol, scale, offset = linear
                self._symbols.setdefault(symbol, sympy.Integer((actual - offset) // scale))

    def _differs(self, described: int | torch.SymInt, actual: int) -> bool:
        """Returns whether a size is another than described. One that data decides may be any."""
        if not isinstance(described, torch.SymInt):
            return described != actual
        expression = described.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = expression.xreplace(self._symbols)
        size = self._sizes[expression]
        return bool(size.is_Integer) and int(size) != actual
