"""Code of AOTInductor for tests of what exportkit changes in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._inductor.codecache import AotCodeCompiler

from exportkit.export.compile.inductor_changes import changed_inductor
from exportkit.export.compile.model_sources import compiling_model_sources
from exportkit.export.compile.toolchain import compiling_for
from exportkit.export.cpu_isas import default_cpu_isa


def compile_code(
    program: torch.export.ExportedProgram, folder: Path, *, isa: str | None = default_cpu_isa(), **of_inductor: Any
) -> Path:
    """A program compiled as an export compiles it, as torch's own package. `of_inductor` adds options."""
    options = {"aot_inductor.precompile_headers": False, **of_inductor}  # see docs/adr/0079-fast-exports.md
    package = str(folder / "code.pt2")
    # In a folder of its own: sources for two instruction sets would read the headers of the first.
    apart = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder))
    with changed_inductor(), compiling_for(isa) as chosen, compiling_model_sources(keep=False), apart:
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=chosen | options)
    return Path(package)


class _Written(BaseException):
    """Ends a compilation. No Exception: those are taken for errors of the compiler."""


def kernels_of(compiling: Callable[[], object]) -> str:
    """The kernels that Inductor writes while a function compiles a program. No compiler runs."""

    def stop(graph: object, wrapper: str, kernels: str, *more: object, **options: object) -> NoReturn:
        raise _Written(kernels)

    with mock.patch.object(AotCodeCompiler, "compile", stop):
        try:
            compiling()
        except _Written as written:
            return str(written)
    raise AssertionError("nothing was compiled")
