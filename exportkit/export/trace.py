"""Traces a model to an ExportedProgram and describes it for the manifest."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit.errors import ExportError
from exportkit.export.call_signature import BoundCall, describe_call
from exportkit.export.cases import RecordedCase, case_sizes, draw_inputs, eager_mode, record_case, state_sha256
from exportkit.export.describe_program import describe_output, describe_program
from exportkit.export.explain import explain_refusal
from exportkit.export.export_options import TraceOptions
from exportkit.export.placement import on_device, parse_floating, prepared
from exportkit.export.preflight import check_model, check_operators, describe_operators, graph_operators
from exportkit.export.program_check import TracedCall, check_program
from exportkit.export.provenance import provenance
from exportkit.export.repeatable import check_random, check_repeatable
from exportkit.export.resolved import EagerModel
from exportkit.export.shapes import DynamicSizes, dynamic_sizes, merge_shapes, parse_places
from exportkit.export.tolerances import accuracy_outputs
from exportkit.export.torch_export import RefusedByTorchError, TracingTask, export_with
from exportkit.package.manifest import ANY_VALUE, Call, Operator, Provenance, Source
from exportkit.package.structure import names
from exportkit.progress import Progress
from exportkit.spec import ExportSpec, Tolerance


@dataclass(frozen=True)
class Traced:
    """A program and its description for the manifest.

    Attributes:
        program: The program, on the device it was traced for.
        call: The signature and the structure of the output.
        operators: The custom operators of the graph.
        cases: The recorded calls.
        source: The description of the eager model.
        provenance: The versions of the software and the commit.
        name: The package's name.
    """

    program: torch.export.ExportedProgram
    call: Call
    operators: tuple[Operator, ...]
    cases: tuple[RecordedCase, ...]
    source: Source
    provenance: Provenance
    name: str


def trace(model: EagerModel, options: TraceOptions, device: torch.device, progress: Progress) -> Traced:
    """Checks a model, traces it and records cases.

    Args:
        model: The model.
        options: How to trace it.
        device: The options' device.
        progress: Called with a description of each step.

    Raises:
        UsageError: An option names an unknown parameter, dimension or dtype.
        OperatorNotExportableError: A custom operator cannot be packed.
        ExportError: torch.export refused the model. The message explains why.
    """
    floating = parse_floating(options.dtype)
    free = options.allow_nondeterministic or model.spec.allow_nondeterministic
    with ready_to_trace(model, options, device) as (task, sizes):
        spec, bound = task.spec, task.bound
        progress("checking the model and its operators")

        def call_model() -> Any:
            return spec.model(*bound.args, **bound.kwargs)

        with eager_mode(tf32=options.tf32):
            result = check_model(call_model, device)
            output = describe_output(result)
            check_repeatable(spec.model, bound, call_model, result, names(output), allow_nondeterministic=free)
        if free:
            spec = replace(spec, tolerances={name: Tolerance(rtol=0.0, atol=ANY_VALUE) for name in names(output)})
        progress("tracing with torch.export")
        program = trace_with_torch_export(spec, bound, sizes)
        if not free:
            check_random(program)
        operators = graph_operators(program.graph_module)
        check_operators(operators, device)
        call = describe_program(program, bound, sizes, output, spec, cast=floating)
        cases = record_cases(spec, call, sizes.example, options, device, progress)
        progress("comparing the program with the cases")
        check_program(TracedCall(task, sizes, program, call), cases, values=not free, tf32=options.tf32)
        source = Source(
            model=model.name,
            model_kwargs=dict(model.model_kwargs),
            dtype=options.dtype,
            seed=model.seed,
            state_sha256=state_sha256(spec.model),
        )
    return Traced(
        program=program,
        call=call,
        operators=describe_operators(operators),
        cases=cases,
        source=source,
        provenance=provenance(tf32=options.tf32),
        name=options.name or spec.name or _class_name(spec.model),
    )


@contextmanager
def ready_to_trace(
    model: EagerModel, options: TraceOptions, device: torch.device
) -> Iterator[tuple[TracingTask, DynamicSizes]]:
    """Yields what to trace, on its device and in its dtype, and its dynamic sizes.

    Raises:
        UsageError: An option names an unknown parameter, dimension or dtype.
    """
    shapes = {} if options.static else merge_shapes(model.spec.dynamic_shapes, parse_places(options.dynamic))
    with prepared(model.spec, device, parse_floating(options.dtype)) as spec:
        task = TracingTask(spec, describe_call(spec.model, spec.example_inputs, spec.example_kwargs))
        yield task, dynamic_sizes(shapes, task.examples)


def record_cases(
    spec: ExportSpec,
    call: Call,
    example: Mapping[str, int],
    options: TraceOptions,
    device: torch.device,
    progress: Progress,
) -> tuple[RecordedCase, ...]:
    """Draws inputs and records the model's outputs.

    Args:
        spec: The model, which is on `device`.
        call: The traced call.
        example: The sizes of the example inputs, by dimension.
        options: The number of cases, their seed, and whether eager may use TF32.
        device: The model's device.
        progress: Called with a description of each case.
    """
    cases = []
    wanted = accuracy_outputs(call.outputs, spec.tolerances)
    for number, sizes in enumerate(case_sizes(call, example, options.cases, options.seed)):
        progress(f"recording case {number + 1}")
        drawn = describe_call(spec.model, *draw_inputs(spec, call, sizes, options.seed + number))
        bound = on_device(drawn, device)
        cases.append(record_case(spec.model, bound, sizes, call.outputs, wanted, tf32=options.tf32))
    return tuple(cases)


def trace_with_torch_export(spec: ExportSpec, bound: BoundCall, sizes: DynamicSizes) -> torch.export.ExportedProgram:
    """Calls torch.export and explains its errors.

    Raises:
        ExportError: torch.export refused the model.
    """
    task = TracingTask(spec, bound)
    try:
        program = export_with(task, sizes)
    except RefusedByTorchError as refused:
        raise explain_refusal(refused, task) from refused.error
    _refuse_mutation(program)
    return program


def _refuse_mutation(program: torch.export.ExportedProgram) -> None:
    signature = program.graph_signature
    if _may_mutate(program):
        with warnings.catch_warnings():
            # torch 2.13 copies its own deprecated LeafSpec.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            signature = program.run_decompositions({}).graph_signature
    if buffers := sorted(set(signature.buffers_to_mutate.values())):
        raise ExportError(
            f"the model changes its buffers {', '.join(buffers)} while it runs: results would depend on earlier calls "
            "and on which runner served them",
            hint="Pass the state in as an input and return it as an output.",
        )
    if inputs := sorted(set(signature.user_inputs_to_mutate.values())):
        raise ExportError(
            f"the model writes into its inputs {', '.join(inputs)}", hint="Clone them first, or return the new value."
        )


def _may_mutate(program: torch.export.ExportedProgram) -> bool:
    """Returns whether an operator of the graph writes into an argument. Only decomposition shows which argument."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return any(target._schema.is_mutable for target in targets if isinstance(target, torch._ops.OpOverload))


def _class_name(model: torch.nn.Module) -> str:
    """Returns the default name of a package: the class's, in the letters that a name may have."""
    ascii_name = unicodedata.normalize("NFKD", type(model).__name__).encode("ascii", "ignore").decode()
    return ascii_name.strip("_")[:128] or "model"
