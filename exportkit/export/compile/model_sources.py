"""Compiles the C++ sources of a model, the wrapper and the kernels, side by side, by ccache where it is installed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._inductor import config, cpp_builder

from exportkit.export.compile.device_header import write_header_without_regex
from exportkit.export.torch_patches.patched import Function, patched

_INCLUDE = "include"
"""The folder beside a source whose headers are read in place of torch's."""


@contextmanager
def compiling_model_sources(*, keep: bool = True) -> Iterator[None]:
    """Lets AOTInductor compile a model's two sources at the same time; it runs one compiler after the other.

    The first compilation of the two returns at once. The link waits for both, and raises what they raised.

    Args:
        keep: Whether ccache is used.
    """
    ccache = shutil.which("ccache") if keep and not config.force_disable_caches else None
    with ThreadPoolExecutor(max_workers=2) as pool:
        sources: list[Future[None]] = []

        def in_the_background(build: Function, builder: Any) -> None:
            target = builder.get_target_file_path()
            if target.endswith((".wrapper.o", ".kernel.o")):
                write_header_without_regex(Path(target).with_name(_INCLUDE))
                sources.append(pool.submit(_compile, builder.get_command_line(), ccache))
                return
            if target.endswith(".so"):
                wait()
            build(builder)

        def wait() -> None:
            while sources:
                sources.pop(0).result()

        with patched("CppBuilder.build", in_the_background):
            yield
            wait()


def _compile(line: str, ccache: str | None) -> None:
    """Compiles a source in its folder.

    The folder is another one each time, and neither the command nor the code has its name. So ccache knows the command
    again, and the same model has the same bytes.

    Args:
        line: What AOTInductor would run.
        ccache: The program, if it is to be used.

    Raises:
        CppCompileError: The compiler refused the source.
    """
    told = shlex.split(line)
    position = next(position for position, argument in enumerate(told) if argument.endswith(".cpp"))
    source = Path(told[position])
    told[position : position + 1] = [source.name, "-I", _INCLUDE, f"-ffile-prefix-map={source.parent}=.", "-w"]
    cpp_builder.run_compile_cmd(shlex.join([*([ccache] if ccache else []), *told]), cwd=str(source.parent))
