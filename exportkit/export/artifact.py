"""Writes what `exportkit export` writes: a traced model, compiled or not, with its call, cases and provenance."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from exportkit.errors import UsageError
from exportkit.export.aot_inductor import compile_program, read_inductor_config
from exportkit.export.model import ResolvedModel
from exportkit.export.program import Progress, Traced, trace, usable_device
from exportkit.export.saved import trace_saved
from exportkit.export.toolchain import CpuIsa, check_cpu_isa, default_cpu_isa, usable_compiler
from exportkit.export.weights import ProgramWeights
from exportkit.package.archive import Content, write_package
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.consistency import CASES_DIR
from exportkit.package.manifest import FORMAT_VERSION, Case, Manifest, Operator, Program, Target, Weight
from exportkit.spec import ExportSpec

PROGRAM_RECORD = "exportkit/program.pt2"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


def export_aoti(
    model: ResolvedModel | ExportSpec,
    out: Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    dynamic: Sequence[str] = (),
    static: bool = False,
    cases: int = 4,
    seed: int = 0,
    cpu_isas: Sequence[CpuIsa] = (),
    cuda_arch: Literal["native", "native+ptx"] = "native+ptx",
    inductor_config: Mapping[str, Any] | None = None,
    embed_weights: bool = False,
    name: str | None = None,
    version: str = "0",
    progress: Progress | None = None,
) -> Manifest:
    """Traces a model, compiles it with AOTInductor for one device, records cases, and writes the artifact.

    The weights lie beside the compiled code, where targets share them and a loader may replace them.

    Args:
        model: What `resolve` returned, or a spec.
        out: The file to write; replaced only when everything worked.
        device: `cpu`, `cuda` or `cuda:1`.
        dtype: What floating parameters, buffers and inputs are cast to (`float16`); left alone if None.
        dynamic: Sizes that vary, as "image:0=batch[1:64]" or "image:2=16*gh[8:96]"; they replace the spec's for that
            dimension.
        static: Every size is that of the example inputs, whatever the spec says.
        cases: How many cases to record.
        seed: Of the drawn cases.
        cpu_isas: What the CPU code may use, a target for each; x86-64-v3 if none is given on x86-64, the
            architecture's baseline elsewhere.
        cuda_arch: `native` has machine code for this GPU alone, `native+ptx` runs on newer ones too.
        inductor_config: Options of torch._inductor.config that override ours.
        embed_weights: Leaves the weights inside the code: for torch's own loaders, which do not look elsewhere.
        name: Of the package.
        version: Of the model.
        progress: Told what is about to be done.

    Raises:
        UsageError: An argument names no parameter, dimension, dtype or option.
        OperatorNotExportableError: A custom operator cannot travel.
        ExportError: torch.export or AOTInductor refused the model; the message explains.
        HostError: This machine has no such device.
        CompilerError: No usable C++ compiler.
    """
    isas = tuple(dict.fromkeys(cpu_isas)) or (default_cpu_isa(),)
    for isa in isas:
        check_cpu_isa(isa)
    options = read_inductor_config(inductor_config or {}, embed_weights=embed_weights)
    on = usable_device(device)
    if on.type != "cpu" and len(isas) > 1:
        raise UsageError(f"{' and '.join(map(str, isas))} for {on.type}", hint="Give one CPU instruction set there.")
    if "cpp.cxx" not in options:
        usable_compiler()  # minutes of tracing are not spent where nothing can be compiled
    say = progress or _silent
    traced = _trace(model, out, on, dtype, dynamic, static, cases, seed, name, version, say)
    weights = None if embed_weights else ProgramWeights(traced.program)
    with temporary_folder(None, "exportkit-compile") as folder:
        compiled = [
            compile_program(
                traced,
                folder / str(number),
                device=on,
                cpu_isa=isa,
                cuda_arch=cuda_arch,
                inductor_config=options,
                weights=weights,
                progress=say,
            )
            for number, isa in enumerate(isas)
        ]
        say(f"writing {out}")
        records: dict[str, Content] = dict(weights.records) if weights else {}
        operators: dict[str, Operator] = {}
        for each in compiled:
            records |= each.records
            operators |= {operator.name: operator for operator in each.operators}
        return _write(
            out,
            traced,
            records,
            version=version,
            targets=tuple(each.target for each in compiled),
            weights=weights.weights if weights else (),
            operators=tuple(operators[name] for name in sorted(operators)),
        )


def export_program(
    model: ResolvedModel | ExportSpec,
    out: Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    dynamic: Sequence[str] = (),
    static: bool = False,
    cases: int = 4,
    seed: int = 0,
    name: str | None = None,
    version: str = "0",
    progress: Progress | None = None,
) -> Manifest:
    """Traces a model, records cases, and writes the ExportedProgram: it is compiled where its target is.

    Arguments and errors are those of `export_aoti`.
    """
    on = usable_device(device)
    say = progress or _silent
    traced = _trace(model, out, on, dtype, dynamic, static, cases, seed, name, version, say)
    say(f"writing {out}")
    buffer = io.BytesIO()
    torch.export.save(traced.program, buffer)
    program = Program(
        record=PROGRAM_RECORD,
        device="cpu" if on.type == "cpu" else "cuda",
        built_with_torch=str(torch.__version__),
    )
    return _write(
        out,
        traced,
        {PROGRAM_RECORD: buffer.getvalue()},
        version=version,
        program=program,
        operators=traced.operators,
    )


def _trace(
    model: ResolvedModel | ExportSpec,
    out: Path,
    device: torch.device,
    dtype: str | None,
    dynamic: Sequence[str],
    static: bool,
    cases: int,
    seed: int,
    name: str | None,
    version: str,
    progress: Progress,
) -> Traced:
    """The model as a program with its cases, traced now or saved before."""
    resolved = model if isinstance(model, ResolvedModel) else ResolvedModel(spec=model)
    for what, value in (("name", name or resolved.spec.name), ("version", version)):
        if value is not None and not _NAME.fullmatch(value):
            raise UsageError(
                f"{value!r} cannot be a {what}", hint="Use up to 128 letters, digits, dots, dashes and underscores."
            )
    check_writable(out)
    if cases < 0:
        raise UsageError(f"the number of cases is {cases}; it must be 0 or more")
    if resolved.program is None:
        return trace(
            resolved,
            device=device,
            dtype=dtype,
            dynamic=dynamic,
            static=static,
            cases=cases,
            seed=seed,
            name=name,
            progress=progress,
        )
    if dtype or dynamic or static:
        raise UsageError(
            f"{resolved.artifact} is traced: its dtype and sizes cannot be changed any more",
            hint="Leave out --dtype, --dynamic and --static, or export the model itself.",
        )
    return trace_saved(resolved, device=device, cases=cases, seed=seed, name=name, progress=progress)


def _write(
    out: Path,
    traced: Traced,
    records: Mapping[str, Content],
    *,
    version: str,
    operators: tuple[Operator, ...],
    targets: tuple[Target, ...] = (),
    weights: tuple[Weight, ...] = (),
    program: Program | None = None,
) -> Manifest:
    cases = {f"{CASES_DIR}/{number}.safetensors": case for number, case in enumerate(traced.cases)}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=traced.name,
        version=version,
        call=traced.call,
        targets=targets,
        weights=weights,
        program=program,
        operators=operators,
        libraries=(),
        cases=tuple(Case(record=record, sizes=dict(case.sizes)) for record, case in cases.items()),
        source=traced.source,
        provenance=traced.provenance,
        records=(),
    )
    return write_package(out, manifest, {**records, **{record: case.tensors for record, case in cases.items()}})


def _silent(_: str) -> None:
    pass
