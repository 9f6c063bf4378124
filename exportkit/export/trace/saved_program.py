"""Prepares a saved ExportedProgram like a newly traced one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map_only

from exportkit.errors import DigestMismatchError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.program_model import ForeignModel
from exportkit.export.models.resolved import EagerModel, SavedProgram
from exportkit.export.provenance import provenance
from exportkit.export.record.cases import eager_mode, state_sha256
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.record import RecordedCase, record_cases
from exportkit.export.sizes.size_changes import sizes_as_texts
from exportkit.export.trace.describe_program import describe_output, describe_program
from exportkit.export.trace.edge_cases import edge_cases
from exportkit.export.trace.operator_arguments import check_calls
from exportkit.export.trace.preflight import (
    check_composites,
    check_model,
    check_operators,
    describe_operators,
    graph_operators,
)
from exportkit.export.trace.saved_sizes import named_sizes
from exportkit.export.trace.trace import trace
from exportkit.export.trace.trace_method import check_writes
from exportkit.export.trace.traced import Traced, TracedMethod
from exportkit.package.archive import Content, PackageReader
from exportkit.package.manifest import Manifest, Source
from exportkit.progress import Progress
from exportkit.sizes import sizes_of
from exportkit.spec import FORWARD


def trace_saved(saved: SavedProgram, options: TraceOptions, device: torch.device, progress: Progress) -> Traced:
    """Uses a saved program instead of tracing, and moves it to another device if necessary.

    A program that exportkit wrote keeps its recorded cases. For another program, cases are drawn and its graph computes
    the outputs.

    Raises:
        UsageError: An option would require new tracing.
        OperatorNotExportableError: A custom operator cannot be packed.
        DigestMismatchError: The file was replaced since the program was read.
    """
    if options.dtype or options.static or (saved.manifest is not None and (options.dynamic or options.ranges)):
        raise UsageError(
            f"{saved.path} is already traced: its dtype and sizes cannot change",
            hint="Leave out --dtype, --dynamic, --range and --static, or export the model itself.",
        )
    progress(f"moving the program to {device}")
    programs = {name: _moved(program, device) for name, program in saved.programs.items()}
    operators = {k: v for program in programs.values() for k, v in graph_operators(program.graph_module).items()}
    check_operators(operators, device)
    for program in programs.values():
        check_calls(program.graph_module, device)
        check_composites(program.module(), partial(_called, program), device)
    if saved.manifest is None:
        return _trace_foreign(saved, programs[FORWARD], options, device, progress)
    manifest = saved.manifest
    if options.state or options.writes:
        raise UsageError(
            f"{saved.path} is already traced: its state and what it writes cannot change",
            hint="Leave out --state and --writes, or export the model itself.",
        )
    if options.tf32 and not manifest.provenance.tf32:
        raise UsageError(
            f"the cases of {saved.path} were recorded without TF32",
            hint="Leave out --tf32, or export the model itself.",
        )
    cases, initial = _recorded(saved, manifest)
    return Traced(
        methods=tuple(
            TracedMethod(method.name, programs[method.name], method.call, method.state) for method in manifest.methods
        ),
        operators=describe_operators(operators),
        cases=cases,
        source=manifest.source,
        provenance=manifest.provenance,
        name=options.name or manifest.name,
        state=manifest.state,
        initial=initial,
    )


def _called(program: torch.export.ExportedProgram, module: torch.nn.Module) -> object:
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, program.example_inputs)
    return module(*args, **kwargs)


def _moved(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    moved = move_to_device_pass(program, device)
    moved._example_inputs = tree_map_only(torch.Tensor, lambda t: t.to(device), moved.example_inputs)
    return moved


def _recorded(saved: SavedProgram, manifest: Manifest) -> tuple[tuple[RecordedCase, ...], dict[str, Content]]:
    """Reads cases and state from the file, which must still be the file that the program was read from."""
    with PackageReader(saved.path) as reader:
        if reader.manifest != manifest:
            raise DigestMismatchError(
                f"{saved.path} was replaced by another package while it was exported", hint="Export it again."
            )
        cases = tuple(
            RecordedCase(case.calls, reader.read(case.record), case.reference_dtype, case.state_accuracy)
            for case in manifest.cases
        )
        return cases, {state.initial: reader.read(state.initial) for state in manifest.state if state.initial}


def _trace_foreign(
    saved: SavedProgram,
    program: torch.export.ExportedProgram,
    options: TraceOptions,
    device: torch.device,
    progress: Progress,
) -> Traced:
    """Describes a program that exportkit did not write, which has no manifest."""
    args, kwargs = program.example_inputs
    if options.state:
        sizes = named_sizes(program, EagerMethods(saved.spec).bind(FORWARD, args, kwargs), options)
        spec = replace(
            saved.spec,
            model=ForeignModel(program),
            example_inputs=args,
            example_kwargs=kwargs,
            dynamic_shapes=sizes_as_texts(sizes),
        )
        return trace(EagerModel(spec), replace(options, dynamic=(), ranges=()), device, progress)
    spec = replace(
        saved.spec, model=program.module(), example_inputs=args, example_kwargs=kwargs, writes=tuple(options.writes)
    )
    eager = EagerMethods(spec)
    bound = eager.bind(FORWARD, args, kwargs)
    check_writes(program, bound, spec, traced=False)
    with eager_mode(tf32=options.tf32):
        answer = check_model(lambda: eager.session().call(FORWARD, bound), device)
    sizes = named_sizes(program, bound, options)
    call, _ = describe_program(
        program, bound, sizes, describe_output(answer.result), spec, written=tuple(answer.written)
    )
    method = TracedMethod(FORWARD, program, call)
    example = {FORWARD: sizes_of(call.inputs, [tensor.shape for tensor in bound.tensors])}
    described = DescribedModel(eager, [method.packaged], (), device, options.tf32)
    cases = record_cases(described, example, options, progress)
    if options.edge_cases and options.cases > 1:
        cases += edge_cases(described, [method], cases, options, progress)
    return Traced(
        methods=(method,),
        operators=describe_operators(graph_operators(program.graph_module)),
        cases=cases,
        source=Source(model=None, model_kwargs={}, dtype=None, seed=0, state_sha256=state_sha256(spec.model)),
        provenance=provenance(tf32=options.tf32),
        name=options.name or spec.name or "model",
    )
