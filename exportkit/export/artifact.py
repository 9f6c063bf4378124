"""Exports a model to an artifact: compiled code or a program, with recorded cases and a manifest."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import torch
from torch.export.graph_signature import ConstantArgument
from torch.utils._pytree import tree_map_only

from exportkit.errors import ExportError
from exportkit.export.compile.aot_inductor import compile_methods
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.compile.eager_kernels import check_places
from exportkit.export.compile.program_weights import ProgramWeights
from exportkit.export.export_options import CompileOptions, TraceOptions, check_name
from exportkit.export.models.placement import usable_device
from exportkit.export.models.resolved import EagerModel, ResolvedModel
from exportkit.export.torch_patches.quiet import quiet_torch
from exportkit.export.trace.saved_program import trace_saved
from exportkit.export.trace.trace import trace
from exportkit.export.trace.traced import Traced
from exportkit.package.archive import Content, write_package
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.consistency import CASES_DIR
from exportkit.package.manifest import FORMAT_VERSION, Case, Manifest, Operator, Program
from exportkit.progress import Progress, silent
from exportkit.spec import FORWARD, ExportSpec

PROGRAM_RECORD = "exportkit/program.pt2"


def export_aoti(
    model: ResolvedModel | ExportSpec,
    out: Path,
    options: TraceOptions = TraceOptions(),
    compile_options: CompileOptions = CompileOptions(),
    *,
    progress: Progress = silent,
) -> Manifest:
    """Traces a model, compiles it with AOTInductor for one device, records cases, and writes the artifact.

    The weights are stored beside the compiled code, where targets share them and a loader can replace them.

    Args:
        model: The result of `resolve`, or a spec.
        out: The file to write. It is replaced only if everything succeeds.
        options: How to trace the model.
        compile_options: How to compile the program.
        progress: Called with a description of each step.

    Raises:
        UsageError: An option names an unknown parameter, dimension, dtype or setting.
        OperatorNotExportableError: A custom operator cannot be packed.
        ExportError: torch.export or AOTInductor refused the model. The message explains why.
        HostError: This machine does not have the device.
        CompilerError: This machine has no usable C++ compiler.
    """
    device = usable_device(options.device)
    plan = CompilePlan.of(compile_options, device)
    traced = traced_model(model, out, options, device, progress)
    check_places(plan.eager_kernels, [method.program for method in traced.methods])
    return write_compiled(traced, out, plan, version=options.version, progress=progress)


def write_compiled(
    traced: Traced, out: Path, plan: CompilePlan, *, version: str, progress: Progress = silent
) -> Manifest:
    """Compiles a traced model for each part of a plan, and writes the artifact.

    Args:
        traced: The model, traced on the plan's device.
        out: The file to write.
        plan: What is compiled.
        version: The model's version.
        progress: Called with a description of each step.

    Raises:
        ExportError: AOTInductor refused the program.
        CompilerError: This machine has no usable C++ compiler.
    """
    programs = [method.program for method in traced.methods]
    weights = None if plan.embed_weights else ProgramWeights(programs)
    with temporary_folder(None, "exportkit-compile") as folder:
        compiled = [
            compile_methods(traced, folder / str(number), plan, isa, weights=weights, progress=progress)
            for number, isa in enumerate(plan.cpu_isas)
        ]
        progress(f"writing {out}")
        records: dict[str, Content] = dict(weights.records) if weights else {}
        operators: dict[str, Operator] = {}
        for each in compiled:
            records |= each.records
            operators |= {operator.name: operator for operator in each.operators}
        manifest = msgspec.structs.replace(
            manifest_of(traced, version),
            targets=tuple(each.target for each in compiled),
            weights=weights.weights if weights else (),
            operators=tuple(operators[name] for name in sorted(operators)),
        )
        return write_package(out, manifest, {**records, **traced_records(traced)})


def export_program(
    model: ResolvedModel | ExportSpec,
    out: Path,
    options: TraceOptions = TraceOptions(),
    *,
    progress: Progress = silent,
) -> Manifest:
    """Traces a model, records cases, and writes the ExportedProgram, to be compiled on the target machine.

    Arguments and errors are the same as for `export_aoti`.
    """
    device = usable_device(options.device)
    traced = traced_model(model, out, options, device, progress)
    progress(f"writing {out}")
    return write_program(traced, out, device=device, version=options.version)


def write_program(traced: Traced, out: Path, *, device: torch.device, version: str) -> Manifest:
    """Writes the program of a traced model as an artifact.

    Raises:
        ExportError: torch cannot write the program to a file.
    """
    saved = {_program_record(method.name): _saved(method.program) for method in traced.methods}
    program = Program(
        records={method.name: _program_record(method.name) for method in traced.methods},
        device="cpu" if device.type == "cpu" else "cuda",
        built_with_torch=str(torch.__version__),
    )
    manifest = msgspec.structs.replace(manifest_of(traced, version), program=program)
    return write_package(out, manifest, {**saved, **traced_records(traced)})


def _program_record(method: str) -> str:
    return PROGRAM_RECORD if method == FORWARD else PROGRAM_RECORD.replace(".pt2", f".{method}.pt2")


def _saved(program: torch.export.ExportedProgram) -> bytes:
    """Returns a program as torch.export.save writes it.

    Raises:
        ExportError: torch cannot write it.
    """
    _without_texts(program)
    buffer = io.BytesIO()
    with quiet_torch():
        try:
            torch.export.save(program, buffer)
        except RuntimeError as error:
            raise ExportError(
                f"torch {torch.__version__} cannot write the program to a file: {str(error).partition(chr(10))[0]}",
                hint="--format aoti compiles the program and does not write it; a newer torch may be able to. Whole "
                "numbers can be written: -(-n // 4) in place of math.ceil(n / 4).",
            ) from error
    return buffer.getvalue()


def _without_texts(program: torch.export.ExportedProgram) -> None:
    """Makes None of each text among a program's outputs: torch writes it and cannot read it. The manifest has it."""
    for outputs in (
        [spec.arg for spec in program.graph_signature.output_specs],
        *(each.signature.outputs for each in program.module_call_graph if each.signature),
    ):
        for output in outputs:
            if isinstance(output, ConstantArgument) and isinstance(output.value, str):
                output.value = None
    node = program.graph.output_node()
    node.args = (tree_map_only(str, lambda _: None, node.args[0]),)


def traced_model(
    model: ResolvedModel | ExportSpec, out: Path, options: TraceOptions, device: torch.device, progress: Progress
) -> Traced:
    """Returns the model as a program with its cases, newly traced or read from a file.

    Raises:
        UsageError: An option is wrong, or `out` cannot be written.
        ExportError: torch.export refused the model.
    """
    resolved = EagerModel(spec=model) if isinstance(model, ExportSpec) else model
    if options.name is None and resolved.spec.name is not None:
        check_name("name", resolved.spec.name)
    model_tensors = {*resolved.spec.model.parameters(), *resolved.spec.model.buffers()}
    check_writable(out, sum(tensor.nbytes for tensor in model_tensors if tensor.layout is torch.strided))
    if isinstance(resolved, EagerModel):
        return trace(resolved, options, device, progress)
    return trace_saved(resolved, options, device, progress)


def manifest_of(traced: Traced, version: str) -> Manifest:
    """Describes a traced model that nothing can run yet: the manifest has neither targets nor a program."""
    return Manifest(
        format_version=FORMAT_VERSION,
        name=traced.name,
        version=version,
        methods=tuple(method.packaged for method in traced.methods),
        state=traced.state,
        targets=(),
        weights=(),
        program=None,
        operators=traced.operators,
        libraries=(),
        cases=tuple(
            Case(
                record=_case_record(number),
                calls=case.calls,
                reference_dtype=case.reference_dtype,
                state_accuracy=dict(case.state_accuracy),
            )
            for number, case in enumerate(traced.cases)
        ),
        source=traced.source,
        provenance=traced.provenance,
        records=(),
    )


def traced_records(traced: Traced) -> dict[str, Content]:
    """Returns the tensors of a traced model's cases and what its state begins with, as its manifest names them."""
    cases = {_case_record(number): case.tensors for number, case in enumerate(traced.cases)}
    return {**cases, **traced.initial}


def _case_record(number: int) -> str:
    return f"{CASES_DIR}/{number}.safetensors"
