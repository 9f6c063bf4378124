"""Programs of csrc/package/tests, which answer questions about the library's parts, and the build of them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.made_once import one_maker

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
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        message = f"no {compiler} to build {name} with (EXPORTKIT_REQUIRE_RUNTIME=1 makes this a failure)"
        pytest.fail(message) if REQUIRED else pytest.skip(message)
    return build(name, compiler, FLAGS)


def build(name: str, compiler: str, flags: Sequence[str]) -> Path:
    """A program of csrc/package/tests with the library's sources. Both are compiled once for their content."""
    digest = hashlib.sha256(repr((compiler, flags)).encode())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    library, built = folder / "library", folder / name
    with one_maker(library) as ours:
        if ours:
            partial = Path(tempfile.mkdtemp(dir=folder))
            commands = [
                [compiler, *flags, "-c", str(source), "-o", str(partial / f"{source.stem}.o")]
                for source in SOURCES.glob("*.cpp")
            ]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))
            partial.rename(library)
    with one_maker(built) as ours:
        if ours:
            partial = folder / f"{name}.partial"
            objects = map(str, library.glob("*.o"))
            _run([compiler, *flags, str(SOURCES / "tests" / f"{name}.cpp"), *objects, "-ldl", "-o", str(partial)])
            partial.rename(built)
    return built


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
