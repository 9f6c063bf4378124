"""Compiles the C++ sources of a model, the wrapper and the kernels, side by side, by ccache where it is installed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._inductor import config, cpp_builder, cpu_vec_isa

from exportkit.export.compiling.lean_sources import cut_interface, interface_source, write_header_without_regex
from exportkit.export.within_torch.torch_internals import replaced


@contextmanager
def compiling_model_sources(*, keep: bool = True, folder: Path | None = None) -> Iterator[None]:
    """Lets AOTInductor compile a model's two sources at the same time; it runs one compiler after the other.

    The first compilation of the two returns at once. The link waits for both, and raises what they raised. The part of
    the wrapper that all models have is compiled while Inductor still writes the rest.

    Args:
        keep: Whether ccache is used.
        folder: Where AOTInductor will write the sources of a model for CPUs, with the options of now. None compiles
            wrappers as a whole.
    """
    ccache = shutil.which("ccache") if keep and not config.force_disable_caches else None
    with ThreadPoolExecutor(max_workers=3) as pool:
        sources: list[Future[None]] = []
        parts: list[Path] = []

        def compile_soon(command: _Command) -> Future[None]:
            command.write_headers()
            return pool.submit(command.run, ccache)

        def in_the_background(build: Callable[[Any], None]) -> Callable[[Any], None]:
            def start(builder: Any) -> None:
                target = builder.get_target_file_path()
                if target.endswith((".wrapper.o", ".kernel.o")):
                    command = _Command.read(builder.get_command_line())
                    if target.endswith(".wrapper.o") and interface and interface.serves(command):
                        sources.append(compiled)
                        parts.append(interface.object)
                    sources.append(compile_soon(command))
                    return
                if target.endswith(".so"):
                    wait()
                    builder._sources_args += "".join(f" {shlex.quote(str(part))}" for part in parts)
                build(builder)

            return start

        def wait() -> None:
            while sources:
                sources.pop(0).result()

        if interface := _interface(folder) if folder else None:
            compiled = compile_soon(interface)
        with replaced(cpp_builder.CppBuilder, "build", in_the_background):
            yield
            wait()


@dataclass(frozen=True)
class _Command:
    """A command that compiles a source.

    Attributes:
        compiler: The program.
        source: The source file.
        options: The other arguments.
        object: The object file.
    """

    compiler: Sequence[str]
    source: Path
    options: Sequence[str]
    object: Path

    @classmethod
    def read(cls, line: str) -> _Command:
        *arguments, c_option, o_option, target = shlex.split(line)
        assert (c_option, o_option) == ("-c", "-o"), line
        place = next(place for place, argument in enumerate(arguments) if argument.endswith(".cpp"))
        return cls(arguments[:place], Path(arguments[place]), arguments[place + 1 :], Path(target))

    def serves(self, wrapper: _Command) -> bool:
        """Cuts the interface that this compiles out of a wrapper. Returns whether it can stand in for it."""
        return self.options == wrapper.options and cut_interface(wrapper.source)

    def write_headers(self) -> None:
        """Writes the header that the compiler reads in place of torch's, unless it is there."""
        folder = self.source.parent / "include"
        if not folder.exists():
            folder.mkdir()
            write_header_without_regex(folder)

    def run(self, ccache: str | None) -> None:
        """Compiles the source.

        The folder is another one each time, and neither the command nor the code has its name. So ccache knows the
        command again, and the same model has the same bytes.

        Raises:
            CppCompileError: The compiler refused the source.
        """
        folder = self.source.parent
        told = [*self.compiler, self.source.name, "-I", "include", *self.options, f"-ffile-prefix-map={folder}=.", "-w"]
        line = shlex.join([*([ccache] if ccache else []), *told, "-c", "-o", str(self.object)])
        cpp_builder.run_compile_cmd(line, cwd=str(folder))


def _interface(folder: Path) -> _Command:
    """Writes the source of the interface, and returns how to compile it."""
    source = folder / "model.interface.cpp"
    source.write_text(interface_source())
    vectors = cpu_vec_isa.pick_vec_isa()
    options = cpp_builder.CppTorchDeviceOptions(
        vec_isa=vectors, device_type="cpu", aot_mode=True, compile_only=True, min_optimize=True
    )
    builder = cpp_builder.CppBuilder(source.stem, str(source), options, output_dir=str(folder))
    return _Command.read(builder.get_command_line())
