"""Traces one method of a model, and checks what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import BoundCall
from exportkit.export.models.method_specs import written_names
from exportkit.export.models.placement import parse_floating
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import EagerAnswer, EagerMethods
from exportkit.export.sizes.shapes import DynamicSizes
from exportkit.export.trace.describe_program import describe_output, describe_program
from exportkit.export.trace.describe_state import check_shapes
from exportkit.export.trace.explain import explain_refusal
from exportkit.export.trace.judged_sizes import Sizes, export_judged
from exportkit.export.trace.lifted import without_unused, written_tensors
from exportkit.export.trace.operator_arguments import check_calls
from exportkit.export.trace.preflight import check_model, check_operators, graph_operators
from exportkit.export.trace.repeatable import (
    DECLARE_STATE,
    DECLARE_WRITES,
    check_constants,
    check_random,
    check_repeatable,
)
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask
from exportkit.export.trace.traced import TracedMethod
from exportkit.package.manifest import ANY_VALUE, Call, StateUse
from exportkit.package.structure import names
from exportkit.progress import Progress, silent
from exportkit.spec import FORWARD, ExportSpec, Tolerance


@dataclass(frozen=True)
class TracedTask:
    """A traced method, and what it was traced from.

    Attributes:
        task: The module of the method and its example call, on their device.
        sizes: The dynamic sizes.
        method: The traced method.
        tried: Sizes at which the program was held against eager, since a condition of the trace fails or ends there.
    """

    task: TracingTask
    sizes: DynamicSizes
    method: TracedMethod
    tried: tuple[Sizes, ...] = ()


def trace_method(
    eager: EagerMethods,
    name: str,
    task: TracingTask,
    sizes: DynamicSizes,
    options: TraceOptions,
    device: torch.device,
    progress: Progress,
    *,
    values: bool,
) -> TracedTask:
    """Checks a method and traces it."""
    bound = task.bound
    of = "" if name == FORWARD else f" {name}"
    progress(f"checking the model and its operators{of and f', in{of}'}")

    def call_model() -> EagerAnswer:
        # With the inputs themselves, so that one that is written and not declared is found.
        return eager.session(sizes.example).call(name, bound, copies=False)

    with eager_mode(tf32=options.tf32):
        answer = check_model(call_model, device, progress)
        output = describe_output(answer.result)
        listed = names(output)
        check_repeatable(
            task.spec.model,
            bound,
            lambda: call_model().result,
            answer.result,
            listed,
            state={each for buffer in eager.buffers for each in buffer.names},
            allow_nondeterministic=not values,
        )
    spec = task.spec
    if not values:
        written = [f"written.{each}" for each in answer.written]
        spec = replace(spec, tolerances=dict.fromkeys((*listed, *written), Tolerance(rtol=0.0, atol=ANY_VALUE)))
    progress(f"tracing{of} with torch.export")
    program, state, tried = trace_with_torch_export(replace(task, spec=spec), sizes, progress)
    with eager_mode(tf32=options.tf32):
        check_constants(program, lambda: call_model().result)
    if values:
        check_random(program)
    check_operators(graph_operators(program.graph_module), device)
    check_calls(program.graph_module, device)
    call, shapes = describe_program(
        program, bound, sizes, output, spec, written=tuple(answer.written), cast=parse_floating(options.dtype)
    )
    check_shapes(name, dict(zip((use.index for use in state), shapes)), eager.buffers)
    return TracedTask(task, sizes, TracedMethod(name, program, _with_tried(call, tried), state), tried)


def _with_tried(call: Call, tried: Sequence[Sizes]) -> Call:
    """Returns a call whose dimensions have the values at which the program was tried."""
    dimensions = []
    for each in call.dimensions:
        values = tuple(sorted({sizes[each.name] for sizes in tried}))
        dimensions.append(structs.replace(each, tried=values) if len(values) > 1 else each)
    return structs.replace(call, dimensions=tuple(dimensions))


def trace_with_torch_export(
    task: TracingTask, sizes: DynamicSizes, progress: Progress = silent
) -> tuple[torch.export.ExportedProgram, tuple[StateUse, ...], tuple[Sizes, ...]]:
    """Calls torch.export and explains its errors.

    Returns the program, which takes the state that it uses after the tensors of the call, that state, and the sizes at
    which it was held against eager.
    """
    try:
        program, tried = export_judged(task, sizes, progress=progress)
    except RefusedByTorchError as refused:
        raise explain_refusal(refused, task) from refused.error
    positions = check_writes(program, task.bound, task.spec)
    program, used = without_unused(program, len(task.state))
    state = tuple(StateUse(index=position, written=position in positions) for position in used)
    return program, state, tried


def check_writes(
    program: torch.export.ExportedProgram, bound: BoundCall, spec: ExportSpec, *, traced: bool = True
) -> list[int]:
    """Checks that a program writes into what is declared, and into nothing else.

    Returns the positions of the state that it writes.
    """
    positions, buffers = written_tensors(program, traced=traced)
    if buffers:
        raise ExportError(
            f"the model changes its buffers {', '.join(buffers)} while it runs: results would depend on earlier calls "
            "and on which runner served them",
            hint=DECLARE_STATE,
        )
    inputs = [bound.names[position] for position in positions if position < len(bound.names)]
    declared = written_names(bound.names, spec.writes)
    if others := [name for name in inputs if name not in declared]:
        raise ExportError(f"the model writes into its inputs {', '.join(others)}", hint=DECLARE_WRITES)
    if missing := [name for name in declared if name not in inputs]:
        raise ExportError(
            f"the inputs {', '.join(missing)} are declared to be written, and the model does not write into them",
            hint="Leave them out of --writes or ExportSpec(writes=...). Writing into a copy is no write.",
        )
    return [position - len(bound.names) for position in positions if position >= len(bound.names)]
