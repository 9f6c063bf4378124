"""Holds a traced program against the recorded cases: what tracing made a constant is wrong in another call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from safetensors.torch import load
from torch.utils._pytree import tree_leaves

from exportkit.errors import ExportError, ExportkitError, OperatorNotExportableError
from exportkit.export.call_signature import describe_call
from exportkit.export.cases import RecordedCase, eager_mode
from exportkit.export.preflight import checking_operators, graph_operators
from exportkit.export.repeatable import ALLOW, agree
from exportkit.export.shapes import DynamicSizes
from exportkit.export.source_lines import where_traced
from exportkit.export.torch_export import RefusedByTorchError, TracingTask, export_with
from exportkit.package.manifest import Call
from exportkit.package.structure import plain
from exportkit.sizes import label_of, shape_at

_LINES = 5  # how many lines with a constant a message shows


@dataclass(frozen=True)
class TracedCall:
    """A traced program, what it was traced from, and what it promises.

    Attributes:
        task: The model and its example call, on their device.
        sizes: The dynamic sizes.
        program: The program.
        call: Its description, which says the sizes of its outputs.
    """

    task: TracingTask
    sizes: DynamicSizes
    program: torch.export.ExportedProgram
    call: Call


def check_program(traced: TracedCall, cases: Sequence[RecordedCase], *, values: bool, tf32: bool) -> None:
    """Runs a program, uncompiled, on the inputs of the recorded cases, and compares it with what eager answered.

    The first case has the sizes of the example inputs, the others have other sizes if sizes vary.

    Args:
        traced: The program.
        cases: The recorded cases.
        values: Whether values are compared, or only sizes: those of a nondeterministic model differ.
        tf32: Whether the cases were recorded with TF32.

    Raises:
        OperatorNotExportableError: A fake kernel is wrong at the sizes of a case.
        ExportError: The program raised, or answered something else.
    """
    module = traced.program.module(check_guards=False)
    operators = bool(graph_operators(traced.program.graph_module))
    for number, case in enumerate(cases):
        tensors = load(case.tensors)
        inputs = tuple(tensors[f"input.{i}"].to(t.device) for i, t in enumerate(traced.task.bound.tensors))
        expected = [tensors[f"output.{i}"] for i in range(len(traced.call.outputs))]
        try:
            answers = _run(traced.task, module, inputs, operators=operators, tf32=tf32)
        except OperatorNotExportableError as error:
            raise OperatorNotExportableError(f"{error.message}, at {label_of(case.sizes)}", hint=error.hint) from error
        except Exception as error:
            # A program raises what its operators raise, and AssertionError for conditions of its own.
            problem = f"raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise _disagreement(traced, inputs, case.sizes, problem, at_example=not number) from error
        if (wrong := _wrong(traced.call, case.sizes, answers, expected, values=values)) is not None:
            raise _disagreement(traced, inputs, case.sizes, wrong, at_example=not number)


def _run(
    task: TracingTask, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, operators: bool, tf32: bool
) -> list[torch.Tensor]:
    args, kwargs = task.bound.with_tensors(inputs)
    with eager_mode(tf32=tf32), checking_operators(inputs[0].device) if operators else nullcontext():
        result = module(*plain(args), **plain(kwargs))
    return [leaf.cpu() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _wrong(
    call: Call,
    sizes: Mapping[str, int],
    answers: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    values: bool,
) -> str | None:
    """Returns what is wrong with the answers; None if nothing is."""
    for output, answer, eager in zip(call.outputs, answers, expected):
        promised = shape_at(output, sizes)
        if len(promised) != eager.ndim or any(p not in (None, size) for p, size in zip(promised, eager.shape)):
            return f"promises output {output.name} of {promised}, and eager answered {list(eager.shape)}"
        if answer.shape != eager.shape:
            return f"answers output {output.name} of {list(answer.shape)}, and eager {list(eager.shape)}"
        if values and not agree(answer, eager):
            return f"answers other values than eager in output {output.name}"
    return None


def _disagreement(
    traced: TracedCall, inputs: tuple[torch.Tensor, ...], sizes: Mapping[str, int], problem: str, *, at_example: bool
) -> ExportError:
    if at_example:
        return ExportError(
            f"the traced program {problem} at {label_of(sizes)}: tracing made a constant of something that the model "
            "computes in Python, such as a counter, the time, or a value kept from an earlier call",
            hint=f"Compute it with torch's operators, or take it as an input. {ALLOW}",
        )
    lines = _constant_lines(traced, inputs)
    return ExportError(
        f"the traced program {problem} at {label_of(sizes)}, though it agrees at the example's sizes: tracing made a "
        "constant of something that depends on a size" + "".join(f"\n    {line}" for line in lines),
        hint="Compute it from the shapes of the inputs in every call, without keeping it, or fix that size.",
    )


def _constant_lines(traced: TracedCall, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """Traces at other sizes too, and returns the lines whose constants differ between the two graphs."""
    model = traced.task.spec.model
    try:
        bound = describe_call(model, *traced.task.bound.with_tensors(inputs))
        other = export_with(TracingTask(traced.task.spec, bound), traced.sizes)
    except (RefusedByTorchError, ExportkitError):
        return []
    nodes, twins = list(traced.program.graph.nodes), list(other.graph.nodes)
    if [node.target for node in nodes] != [twin.target for twin in twins]:
        return []
    lines = [
        f"{where_traced(node) or node.name} has {_listed(here)}; at those sizes {_listed(there)}"
        for node, twin in zip(nodes, twins)
        if (here := _constants(node)) != (there := _constants(twin))
    ]
    return list(dict.fromkeys(lines))[:_LINES]


def _constants(node: torch.fx.Node) -> list[int | float]:
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if type(leaf) in (int, float)]


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(map(str, numbers))
