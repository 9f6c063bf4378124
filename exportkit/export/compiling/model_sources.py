"""Compiles the C++ sources of a model, the wrapper and the kernels: side by side, and each only once.

An object file is kept under the digest of what the compiler reads and is told: the preprocessed source, the options and
the compiler's version. So a changed header, option or compiler is compiled again. Objects are kept in `exportkit` in
Inductor's cache folder: $TORCHINDUCTOR_CACHE_DIR, or torchinductor_<user> in the temporary folder.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._inductor import config, cpp_builder, cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from exportkit.export.compiling.lean_sources import (
    cut_interface,
    interface_source,
    leave_out_wide_vectors,
    write_header_without_regex,
)
from exportkit.export.torch_patches.torch_internals import replaced
from exportkit.package.atomic import write_whole

KEPT_OBJECTS = 256  # of about 200 KB each


@contextmanager
def compiling_model_sources(*, keep: bool = True, folder: Path | None = None) -> Iterator[None]:
    """Lets AOTInductor compile a model's two sources at the same time; it runs one compiler after the other.

    The first compilation of the two returns at once. The link waits for both, and raises what they raised. The part of
    the wrapper that all models have is compiled while Inductor still writes the rest.

    Args:
        keep: Whether objects are kept, and taken from an earlier compilation.
        folder: Where AOTInductor will write the sources of a model for CPUs, with the options of now. None compiles
            wrappers as a whole.
    """
    with ThreadPoolExecutor(max_workers=3) as pool:
        sources: list[Future[None]] = []
        parts: list[Path] = []

        def compile_soon(command: _Command) -> Future[None]:
            command.write_headers()
            objects = _object_folder() if keep and not config.force_disable_caches else None
            return pool.submit(_compile, command, objects)

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
        compiler: The program and its first arguments, such as ccache's.
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

    @property
    def arguments(self) -> list[str]:
        """The command up to what it makes.

        The wrapper's messages quote __FILE__. Without the folder's name, which is another one each time, the same model
        gives the same code.
        """
        folder = self.source.parent
        changed = ["-I", str(folder / "include"), f"-ffile-prefix-map={folder}=.", "-w"]
        return [*self.compiler, str(self.source), *changed[:2], *self.options, *changed[2:]]

    def serves(self, wrapper: _Command) -> bool:
        """Cuts the interface that this compiles out of a wrapper. Returns whether it can stand in for it."""
        return self.options == wrapper.options and cut_interface(wrapper.source)

    def write_headers(self) -> None:
        """Writes the headers that the compiler reads in place of others, unless they are there."""
        folder = self.source.parent / "include"
        if folder.exists():
            return
        folder.mkdir()
        write_header_without_regex(folder)
        if cpp_builder.is_gcc() and "-march=x86-64-v3" in self.options:
            place = _output([*self.compiler, "-print-file-name=include"]) or b""
            leave_out_wide_vectors(folder, Path(os.fsdecode(place.strip())))

    def digest(self) -> str | None:
        """The digest of what the compiler reads and is told, or None if it cannot preprocess the source."""
        version = _output([*self.compiler, "--version"])
        text = self.object.with_suffix(".i")  # a pipe of megabytes would keep this thread waiting for Inductor's
        if version is None or _output([*self.arguments, "-E", "-P", "-o", str(text)]) is None:
            return None
        told = b"\0".join([version, *map(os.fsencode, self.options)])
        return hashlib.sha256(hashlib.sha256(told).digest() + text.read_bytes()).hexdigest()


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


def _output(command: Sequence[str]) -> bytes | None:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return done.stdout if done.returncode == 0 else None


def _compile(command: _Command, objects: Path | None) -> None:
    """Compiles a source, or takes the object file of an earlier compilation of the same.

    Args:
        command: What AOTInductor would run.
        objects: The folder of kept objects, or None to keep none.

    Raises:
        CppCompileError: The compiler refused the source.
    """
    digest = command.digest() if objects else None
    kept = objects / f"{digest}.o" if objects and digest else None
    if kept is not None:
        with suppress(OSError):  # it is not there, or another process removed it meanwhile
            shutil.copyfile(kept, command.object)
            os.utime(kept)
            return
    line = shlex.join([*command.arguments, "-c", "-o", str(command.object)])
    cpp_builder.run_compile_cmd(line, cwd=str(command.source.parent))
    if kept is not None:
        with suppress(OSError):  # a full disk: the next export compiles it again
            write_whole(kept, command.object.read_bytes())
            _remove_oldest(kept.parent)


def _object_folder() -> Path | None:
    """Returns the folder of the kept objects. None: another user could change it, or it cannot be made."""
    try:
        folder = Path(cache_dir()).resolve() / "exportkit"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if all(_only_ours(path.stat()) for path in (folder, *folder.parents)) else None
    except OSError:
        return None


def _only_ours(status: os.stat_result) -> bool:
    sticky = status.st_mode & stat.S_ISVTX and status.st_uid == 0
    return status.st_uid in (0, os.getuid()) and (bool(sticky) or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _remove_oldest(folder: Path) -> None:
    objects = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
    for path in objects[:-KEPT_OBJECTS]:
        path.unlink(missing_ok=True)
