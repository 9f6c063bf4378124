"""Holds a traced program against the recorded cases: what tracing made a constant is wrong in another call."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from safetensors.torch import load

from exportkit.errors import ExportError, OperatorNotExportableError
from exportkit.export.models.source_lines import where_traced
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import DescribedModel
from exportkit.export.record.record import RecordedCase
from exportkit.export.sizes.shapes import DynamicSizes
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.trace.lifted import run_program
from exportkit.export.trace.operator_trace import UNWRITTEN, filled
from exportkit.export.trace.preflight import checking_operators, graph_operators
from exportkit.export.trace.repeatable import ALLOW, WRITE_FIRST, agree
from exportkit.export.trace.trace_method import TracedTask
from exportkit.package.case_files import result_keys, results_in, results_of, state_keys, state_results
from exportkit.package.manifest import TensorOutput
from exportkit.package.structure import plain
from exportkit.sizes import label_of, shape_at
from exportkit.spec import FORWARD

_REFUSED_SIZE = re.compile(r"Runtime assertion failed for expression (.*\bu\d+\b.*) on node")  # of a size in data
_FEWER = ", of fewer dimensions,"


def check_programs(
    model: DescribedModel, traced: Sequence[TracedTask], cases: Sequence[RecordedCase], *, values: bool
) -> None:
    """Runs the programs, uncompiled, through the recorded cases, and compares them with what eager answered.

    The first case of a method has the sizes of the example inputs, the others have other sizes if sizes vary. Without
    `values`, only sizes are compared.
    """
    runs = {each.method.name: _Run(each, tf32=model.tf32) for each in traced}
    seen: set[str] = set()
    for case in cases:
        tensors = load(case.tensors)
        sizes = {name: size for call in case.calls for name, size in call.sizes.items()}
        held = [buffer.at(sizes) for buffer in model.eager.buffers]
        for number, call in enumerate(case.calls):
            run = runs[call.method]
            called = run.traced.method.call
            inputs = tuple(
                tensors[f"{number}.input.{i}"].to(t.device) for i, t in enumerate(run.traced.task.bound.tensors)
            )
            expected = results_in(result_keys(number, called), tensors)
            if left_out := [each.name for each in called.outputs if each.name not in expected]:
                raise ExportError(
                    f"eager answers None in output {left_out[0]}, of which the program makes a tensor: an operator "
                    "left it undefined, and its fake kernel did not",
                    hint="Return what the operator makes at these arguments, and leave out the rest.",
                )
            at_example = call.method not in seen
            disagreement = partial(_disagreement, run, inputs, held, call.sizes, at_example, number)
            seen.add(call.method)
            try:
                answers = run.answers(inputs, held)
            except OperatorNotExportableError as error:
                raise OperatorNotExportableError(
                    f"{error.message}, at {label_of(call.sizes)}", hint=error.hint
                ) from error
            except Exception as error:
                # A program raises what its operators raise, and AssertionError for conditions of its own.
                problem = f"raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                raise disagreement(problem) from error
            if (wrong := _wrong(results_of(called), call.sizes, answers, expected, values=values)) is not None:
                raise disagreement(wrong)
        after = results_in(state_keys(model.state), tensors)
        found = {each.name: tensor.cpu() for each, tensor in zip(model.state, held)}
        if after and (wrong := _wrong(state_results(model.state), sizes, found, after, values=values)) is not None:
            raise ExportError(
                f"after a session of {', '.join(call.method for call in case.calls)}, the traced program {wrong}: "
                "tracing made a constant of something that outlives a call and is no buffer",
                hint="Keep it in a buffer and declare that: --state NAME, or ExportSpec(state=...).",
            )


class _Run:
    """Runs the program of a method."""

    def __init__(self, traced: TracedTask, *, tf32: bool) -> None:
        self.traced = traced
        self._module = traced.method.program.module(check_guards=False)
        self._operators = bool(graph_operators(traced.method.program.graph_module))
        self._tf32 = tf32
        self._unwritten = [node for node in traced.method.program.graph.nodes if _allocates(node.target)]

    def answers(self, inputs: tuple[torch.Tensor, ...], held: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the results of a call by name. It writes into the inputs that it writes, and into the state.

        Memory that is allocated and not written has NaN, which a result shows that reads it.
        """
        if not self._unwritten:
            return self._run(inputs, held)
        with watched_by(_Filled()):
            return self._run(inputs, held)

    def unwritten_lines(self, inputs: tuple[torch.Tensor, ...], held: Sequence[torch.Tensor]) -> list[str]:
        """Returns the calls whose memory a result of this call reads though nobody wrote it."""

        def run(filled: int) -> dict[str, torch.Tensor] | None:
            try:
                with watched_by(_Filled(filled)):
                    return self._run(tuple(each.clone() for each in inputs), [each.clone() for each in held])
            except Exception:  # an operator may refuse what it finds there
                return None

        usual = run(-1) if self._unwritten else None
        return [
            f"{node.target} at {where_traced(node) or node.name}"
            for number, node in enumerate(self._unwritten)
            if usual is not None
            and ((other := run(number)) is None or not all(agree(usual[name], other[name]) for name in usual))
        ]

    def _run(self, inputs: tuple[torch.Tensor, ...], held: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        method, bound = self.traced.method, self.traced.task.bound
        args, kwargs = bound.with_tensors(inputs)
        state = [held[use.index] for use in method.state]
        with eager_mode(tf32=self._tf32), checking_operators(inputs[0].device) if self._operators else nullcontext():
            result = run_program(self._module, plain(args), plain(kwargs), state)
        found = dict(zip((output.name for output in method.call.outputs), result))
        found |= {f"written.{n}": t for n, t, i in zip(bound.names, inputs, method.call.inputs) if i.written}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


class _Filled(OperatorMode):
    """Fills memory that is allocated and not written: with NaN, or with 0 where only one call's is to have NaN."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self._only, self._count = only, 0

    def operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        answer = func(*args, **kwargs)
        if not _allocates(func):
            return answer
        self._count += 1
        return filled(answer) if self._only in (None, self._count - 1) else answer.zero_()


def _allocates(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in UNWRITTEN


def _wrong(
    results: Sequence[TensorOutput],
    sizes: Mapping[str, int],
    answers: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    values: bool,
) -> str | None:
    """Returns what is wrong with the answers; None if nothing is."""
    for output in results:
        answer, eager = answers[output.name], expected[output.name]
        promised = shape_at(output, sizes)
        if len(promised) != eager.ndim or any(p not in (None, size) for p, size in zip(promised, eager.shape)):
            fewer = _FEWER if eager.ndim < len(promised) else ""
            return f"promises output {output.name} of {promised}, and eager answered {list(eager.shape)}{fewer}"
        if answer.shape != eager.shape:
            return f"answers output {output.name} of {list(answer.shape)}, and eager {list(eager.shape)}"
        if values and not agree(answer, eager):
            return f"answers other values than eager in output {output.name}"
    return None


def _disagreement(
    run: _Run,
    inputs: tuple[torch.Tensor, ...],
    held: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
    at_example: bool,
    number: int,
    problem: str,
) -> ExportError:
    """Explains what went wrong in a call: at the sizes of the example or not, after a number of calls of a session."""
    traced, label = run.traced, label_of(sizes)
    name = traced.method.name
    of = "" if name == FORWARD else f" of {name}"
    if unwritten := run.unwritten_lines(inputs, held):
        return ExportError(
            f"the model{of} reads memory that nobody wrote"
            + (f", at {label}" if sizes else "")
            + "".join(f"\n    {line}" for line in unwritten),
            hint=f"{WRITE_FIRST} {ALLOW}",
        )
    if found := _REFUSED_SIZE.search(problem):
        return ExportError(
            f"the traced program{of} refuses, at {label}, what eager answers: it was traced for {found[1]}",
            hint="Let the fake kernel name only what the operator keeps to: new_dynamic_size(min=0). What the model "
            "itself needs, let it check in eager, too: torch._check(size >= 2).",
        )
    if number or at_example:
        when = f"in call {number + 1} of a session" if number else f"at {label}"
        return ExportError(
            f"the traced program{of} {problem} {when}: tracing made a constant of something that the model computes in "
            "Python, such as a counter, the time, or a value kept from an earlier call",
            hint="Compute it with torch's operators, take it as an input, or keep it in a buffer and declare that: "
            f"--state NAME, or ExportSpec(state=...). {ALLOW}",
        )
    if any(tensor.is_floating_point() and not tensor.isfinite().all() for tensor in inputs):
        return ExportError(
            f"the traced program{of} {problem} where an input has NaN or an infinity, though it agrees elsewhere",
            hint="Python's max() and min() of tensors, which torch.export takes for torch.maximum and torch.minimum, "
            "leave NaN out where it comes second: write torch's. --no-edge-cases records no such case.",
        )
    if not sizes:
        return ExportError(
            f"the traced program{of} {problem}, though it agrees at the example's values: tracing made a constant of "
            "something that the model computes in Python from values",
            hint="Compute it with torch's operators, or take it as an input.",
        )
    if problem.startswith("raises"):
        return ExportError(
            f"the traced program{of} {problem} at {label}, though it agrees at the example's sizes: eager takes "
            "another way there, which tracing did not see",
            hint="Leave such sizes out of the declared range (NAME[LOW:HIGH]), or write the branch with torch.cond.",
        )
    if problem.endswith(_FEWER) and (options := _from_two(traced.sizes, sizes)):
        return ExportError(
            f"the traced program{of} {problem} at {label}: where a size is 1, eager drops its dimension",
            hint="squeeze() drops every size that is 1: name the dimension that always is, such as squeeze(-1), or "
            f"begin the range at 2: {' '.join(options)}",
        )
    return ExportError(
        f"the traced program{of} {problem} at {label}, though it agrees at the example's sizes: tracing made a "
        "constant of something that depends on a size",
        hint="Compute it from the shapes of the inputs in every call, without keeping it, or fix that size.",
    )


def _from_two(sizes: DynamicSizes, at: Mapping[str, int]) -> list[str]:
    """Returns the options that leave out the sizes of 1 that a call has."""
    ones = {size.dimension for size in sizes.by_axis.values() if size.at(at) == 1}
    ends = {d.name: f"{at[d.name] + 1}:{d.max}" for d in sizes.dimensions if d.name in ones and d.max > at[d.name] + 1}
    return [
        f"--dynamic {shlex.quote(f'{tensor}:{dim}={size}[{ends[size.dimension]}]')}"
        for (tensor, dim), size in sizes.by_axis.items()
        if size.dimension in ends
    ]
