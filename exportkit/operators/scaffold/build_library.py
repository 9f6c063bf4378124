"""Builds the operator libraries of a source folder, and loads them in a fresh process.

The folder's own setup.py builds them (`build_ext --inplace`), with ninja where torch's BuildExtension finds it, so that
only what changed is compiled. torch's just-in-time loader is not used: a build of it that is killed leaves a lock file
that the next one waits for without end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.child.channel import Channel
from exportkit.child.messages import Failed, Message, decode, encode
from exportkit.child.probe import Registrations, registrations
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import BuildError, UsageError
from exportkit.installed import declared_module, operator_namespaces

_SHOWN_LINES = 60
# What a compiler says of an error, and lines that are no help: ninja's, and the chain of included files.
_NOISE = re.compile(
    r"\[\d+/\d+\] |FAILED: |ninja: |In file included from |\s+from .*[,:]$|compilation terminated|make\b"
)
_COMMAND = re.compile(r"\S*(\+\+|gcc|cc|clang|nvcc|ninja)(-\d+)? .*-(c|o|shared) ")
_ERROR = re.compile(r"error[: ]|fatal +:|undefined reference|\bld: ")


class Build(Message, frozen=True):
    """Asks the child to build a folder. The answer is Built.

    Attributes:
        folder: The folder of setup.py.
        log: The file that gets what the compilers print.
        debug: Whether to build with symbols and without optimisation.
    """

    folder: str
    log: str
    debug: bool


class Built(Message, frozen=True):
    """The libraries that setup.py built, the first to load first."""

    libraries: tuple[str, ...]


@dataclass(frozen=True)
class BuiltLibrary:
    """A library that was built, and what a fresh process found in it.

    Attributes:
        path: The library.
        registrations: The schemas of its operators, and the kinds of its kernels.
    """

    path: Path
    registrations: Registrations


def build_folder(folder: Path, debug: bool = False) -> tuple[BuiltLibrary, ...]:
    """Builds what changed, and loads the operator libraries in a fresh process.

    Whatever ends this process, or this call, ends the compilers.

    Args:
        folder: A folder with a setup.py, such as `exportkit ops new` writes.
        debug: Builds with symbols and without optimisation.

    Returns:
        Those of the libraries that register operators or kernels.

    Raises:
        UsageError: The folder has no setup.py.
        BuildError: A compiler, or setup.py, failed. The message has what it said.
        LibraryLoadError: A library cannot be loaded.
    """
    folder = folder.resolve()
    if not (folder / "setup.py").is_file():
        raise UsageError(
            f"{folder} has no setup.py, which says how its operators are built",
            hint="Name the folder of a package with operators: `exportkit ops build DIR`. "
            "`exportkit ops new NAME --package my_ops` writes one.",
        )
    libraries = [Path(path) for path in _build(folder, debug) if Path(path).exists()]
    found = registrations(*libraries) if libraries else ()
    return tuple(
        BuiltLibrary(path, registered)
        for path, registered in zip(libraries, found)
        if registered.defines or registered.kernels
    )


def check_arguments(folder: Path, libraries: Sequence[BuiltLibrary]) -> list[str]:
    """Returns what `exportkit ops check` is told to hold the operators to their SPECs.

    Two dtypes are enough for a quick check: gradients are compared in float64.

    The operators' Python package is beside the library, or an installed package declares it. SPECs are in the modules
    that it imports, or in the folder's tests.
    """
    library = libraries[0]
    namespaces = {name.partition("::")[0] for name in library.registrations.defines}
    declared = sorted(namespaces & set(operator_namespaces()))
    if (library.path.parent / "__init__.py").is_file():
        source = str(library.path.parent)
    else:
        source = declared_module(declared[0]) if declared else str(library.path)
    specs = [path for path in sorted(folder.resolve().glob("tests/test_*.py")) if "\nSPEC = " in path.read_text()]
    named = (part for path in specs for part in ("--spec", f"{path}:SPEC"))
    return [source, "--dtype", "float32", "--dtype", "float64", *named]


def _build(folder: Path, debug: bool) -> tuple[str, ...]:
    log = folder / "build" / "exportkit.log"
    log.parent.mkdir(exist_ok=True)
    process = ChildProcess("exportkit.operators.scaffold.build_worker", search_path="caller", captured=True)
    channel = Channel(process.connection)
    try:
        channel.send(encode(Build(str(folder), str(log), debug)))
        answer = decode(channel.receive()[0], Built | Failed)
    except ConnectionError as error:
        status = process.wait(10)
        end = "closed its connection" if status is None else describe_end(status)
        said, _ = _readable(log, folder)
        raise BuildError("\n".join([f"the process that builds {folder} {end}", *said])) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Ninja is in the child's process group. Its compilers are not: it ends them when it is asked to end.
            os.killpg(process.pid, signal.SIGTERM)
        process.end()
        channel.close()
    if isinstance(answer, Failed):
        said, compiler = _readable(log, folder)
        raise BuildError(
            "\n".join([f"{folder.name} does not build", *said, *([] if compiler else [str(answer.exception())])]),
            hint=f"{log} has all that the compilers said.",
        )
    return answer.libraries


def _readable(log: Path, folder: Path) -> tuple[list[str], bool]:
    """What the compilers said that helps: errors, and what they point at, with paths relative to the folder.

    Where they said of no error, it is the end of the log, and the second value is False.
    """
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [line for line in lines if not _NOISE.match(line) and not _COMMAND.match(line)]
    first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), None)
    if first is None:
        return lines[-_SHOWN_LINES:], False
    while first > 0 and re.match(r"\S+: In |\S+:\d+:\d+: +required from", lines[first - 1]):
        first -= 1
    # What follows the last error is Python's account of it.
    last = next((at for at, line in enumerate(lines) if line.startswith("Traceback ")), len(lines))
    shown = lines[first : max(last, first + 1)][:_SHOWN_LINES]
    return [line.replace(f"{folder}/", "") for line in shown], True


# --- waiting for changes in source files ------------------------------------------------------------------------------


_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".inc", ".py")
_SKIPPED = {"build", "dist", "node_modules", "__pycache__"}
_SECONDS = 0.5

State = dict[str, tuple[int, int]]


def changes(folder: Path, seconds: float = _SECONDS) -> Iterator[list[str]]:
    """Yields the files that changed, whenever some did, without end.

    What changes from this call on is yielded, also while the caller works. A change is yielded when nothing else has
    changed for a while, because an editor writes several files, or one in several steps.

    Args:
        folder: Where the sources are. Folders that hold no sources, such as `build`, are skipped.
        seconds: How long to wait between two looks.
    """
    return _changes(folder, source_files(folder), seconds)


def _changes(folder: Path, seen: State, seconds: float) -> Iterator[list[str]]:
    while True:
        time.sleep(seconds)
        now = source_files(folder)
        if now == seen:
            continue
        while (later := _after(folder, seconds)) != now:
            now = later
        changed = sorted(path for path in seen.keys() | now.keys() if seen.get(path) != now.get(path))
        seen = now
        if changed:  # an editor may have written what was there before
            yield changed


def _after(folder: Path, seconds: float) -> State:
    time.sleep(seconds)
    return source_files(folder)


def source_files(folder: Path) -> State:
    """Returns the time and the size of each source file, by its path in the folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in files:
            if name.endswith(_SUFFIXES):
                path = os.path.join(root, name)
                try:
                    status = os.stat(path)
                except OSError:  # it was removed meanwhile
                    continue
                found[os.path.relpath(path, folder)] = (status.st_mtime_ns, status.st_size)
    return found
