"""Prepares a saved ExportedProgram like a newly traced one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map_only

from exportkit.errors import DigestMismatchError, UsageError
from exportkit.export.call_signature import describe_call
from exportkit.export.cases import RecordedCase, eager_mode, state_sha256
from exportkit.export.describe_program import describe_output, describe_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.preflight import check_model, check_operators, describe_operators, graph_operators
from exportkit.export.provenance import provenance
from exportkit.export.resolved import SavedProgram
from exportkit.export.shapes import DynamicSizes
from exportkit.export.trace import Traced, record_cases
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest, Source
from exportkit.progress import Progress
from exportkit.sizes import sizes_of


def trace_saved(saved: SavedProgram, options: TraceOptions, device: torch.device, progress: Progress) -> Traced:
    """Uses a saved program instead of tracing, and moves it to another device if necessary.

    A program that exportkit wrote keeps its recorded cases. For another program, cases are drawn and its graph computes
    the outputs.

    Args:
        saved: The program.
        options: The number of cases to draw, and the package's name.
        device: The options' device.
        progress: Called with a description of each step.

    Raises:
        UsageError: An option would require new tracing.
        OperatorNotExportableError: A custom operator cannot be packed.
        DigestMismatchError: The file was replaced since the program was read.
    """
    if options.dtype or options.dynamic or options.static:
        raise UsageError(
            f"{saved.path} is already traced: its dtype and sizes cannot change",
            hint="Leave out --dtype, --dynamic and --static, or export the model itself.",
        )
    progress(f"moving the program to {device}")
    program = move_to_device_pass(saved.program, device)
    program._example_inputs = tree_map_only(torch.Tensor, lambda t: t.to(device), program.example_inputs)
    operators = graph_operators(program.graph_module)
    check_operators(operators, device)
    if saved.manifest is None:
        return _trace_foreign(saved, program, options, device, progress)
    manifest = saved.manifest
    if options.tf32 and not manifest.provenance.tf32:
        raise UsageError(
            f"the cases of {saved.path} were recorded without TF32",
            hint="Leave out --tf32, or export the model itself.",
        )
    return Traced(
        program=program,
        call=manifest.call,
        operators=describe_operators(operators),
        cases=_recorded(saved, manifest),
        source=manifest.source,
        provenance=manifest.provenance,
        name=options.name or manifest.name,
    )


def _recorded(saved: SavedProgram, manifest: Manifest) -> tuple[RecordedCase, ...]:
    """Reads the cases from the file, which must still be the file that the program was read from."""
    with PackageReader(saved.path) as reader:
        if reader.manifest != manifest:
            raise DigestMismatchError(
                f"{saved.path} was replaced by another package while it was exported", hint="Export it again."
            )
        return tuple(
            RecordedCase(case.sizes, reader.read(case.record), case.reference_dtype, case.accuracy)
            for case in manifest.cases
        )


def _trace_foreign(
    saved: SavedProgram,
    program: torch.export.ExportedProgram,
    options: TraceOptions,
    device: torch.device,
    progress: Progress,
) -> Traced:
    """Describes a program that exportkit did not write, which has no manifest."""
    args, kwargs = program.example_inputs
    spec = replace(saved.spec, model=program.module(), example_inputs=args, example_kwargs=kwargs)
    bound = describe_call(spec.model, args, kwargs)
    with eager_mode(tf32=options.tf32):
        result = check_model(lambda: spec.model(*args, **kwargs), device)
    call = describe_program(program, bound, DynamicSizes(), describe_output(result), spec)
    example = sizes_of(call.inputs, [tensor.shape for tensor in bound.tensors])
    return Traced(
        program=program,
        call=call,
        operators=describe_operators(graph_operators(program.graph_module)),
        cases=record_cases(spec, call, example, options, device, progress),
        source=Source(model=None, model_kwargs={}, dtype=None, seed=0, state_sha256=state_sha256(spec.model)),
        provenance=provenance(tf32=options.tf32),
        name=options.name or spec.name or "model",
    )
