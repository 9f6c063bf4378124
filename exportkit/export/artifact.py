"""Writes what `exportkit export` writes: a traced model, compiled or not, with its call, cases and provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from exportkit.export.model import ResolvedModel
from exportkit.package.manifest import Manifest
from exportkit.spec import ExportSpec

Progress = Callable[[str], None]
"""Called with what is about to be done, such as "compiling for cpu (x86-64-v3)"."""


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
    cpu_isa: Literal["x86-64-v3", "x86-64-v4"] | None = None,
    cuda_arch: Literal["native", "native+ptx"] = "native+ptx",
    inductor_config: Mapping[str, Any] | None = None,
    name: str | None = None,
    version: str = "0",
    progress: Progress | None = None,
) -> Manifest:
    """Traces a model, compiles it with AOTInductor for one device, records cases, and writes the artifact.

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
        cpu_isa: What the CPU code may use; x86-64-v3 if None on x86-64, the architecture's baseline elsewhere.
        cuda_arch: `native` has machine code for this GPU alone, `native+ptx` runs on newer ones too.
        inductor_config: Options of torch._inductor.config that override ours.
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
    raise NotImplementedError


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
    raise NotImplementedError
