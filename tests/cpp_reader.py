"""Programs of csrc/package/tests, which answer questions about parts of the library, and how they are built."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exportkit.package import core
from tests.aarch64 import emulated
from tests.made_once import one_maker
from tests.subprocesses import output_of

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc" / "package"
CACHE = ROOT / ".cache" / "cpp_reader"
REQUIRED = os.environ.get("EXPORTKIT_REQUIRE_RUNTIME") == "1"

# The library's own checks of bounds end the process where it would go wrong: a verdict must not be luck.
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS", f"-I{ROOT / 'csrc'}"]


class CppReader:
    """A process of a program of csrc/package/tests, usable from several threads."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def ask(self, *words: object) -> dict[str, Any]:
        """The answer to one command, as the program's source has them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write("\t".join(map(str, words)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, f"the C++ reader ended with status {self._process.wait()} on {words}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


@functools.lru_cache
def program(name: str = "check_package") -> Path:
    """A built program; skips the test where it cannot be built, unless EXPORTKIT_REQUIRE_RUNTIME=1."""
    if emulated.missing() is None:
        return _for_aarch64(name)
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        message = f"no {compiler} to build {name} with (EXPORTKIT_REQUIRE_RUNTIME=1 makes this a failure)"
        pytest.fail(message) if REQUIRED else pytest.skip(message)
    return build(name, compiler, FLAGS)


def _for_aarch64(name: str) -> Path:
    """A script that runs the program of this name under an emulator of aarch64."""
    library = emulated.LIBRARIES / "lib" / core.LIBRARY.name
    program = build(name, emulated.COMPILER, FLAGS, library)
    script = program.with_suffix(".sh")
    with one_maker(script) as ours:
        if ours:
            script.write_text(f'#!/bin/sh\nexec {shlex.join(emulated.emulated(program))} "$@"\n')
            script.chmod(0o755)
    return script


def build(name: str, compiler: str, flags: Sequence[str], library: Path = core.LIBRARY) -> Path:
    """A program of csrc/package/tests, linked with the library as it was built. It is compiled once for its content."""
    digest = hashlib.sha256(repr((compiler, flags)).encode() + library.read_bytes())
    for source in sorted((SOURCES / "tests").iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    built = CACHE / digest.hexdigest()[:16] / name
    with one_maker(built) as ours:
        if ours:
            partial = built.with_suffix(".partial")
            linked = [str(library), f"-Wl,-rpath,{library.parent}"]
            source = SOURCES / "tests" / f"{name}.cpp"
            command = [compiler, *flags, str(source), *linked, "-o", str(partial)]
            output_of(*command)
            partial.rename(built)
    return built
