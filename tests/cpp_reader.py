"""The C++ package reader, in a process that answers questions, and the build of it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc" / "runtime"
CACHE = ROOT / ".cache" / "cpp_reader"
REQUIRED = os.environ.get("EXPORTKIT_REQUIRE_RUNTIME") == "1"

# The library's own checks of bounds end the process where it would go wrong: a verdict must not be luck.
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS", f"-I{ROOT / 'csrc'}"]


class CppReader:
    """A process of a program of csrc/runtime/tests, usable from several threads."""

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

    def verdict(self, path: Path) -> str | None:
        """The name of the error class for a package; None where every digest holds."""
        answer = self.ask("package", path)
        return None if "ok" in answer else answer["error"] or f"no verdict: {answer['message']}"


@functools.lru_cache(maxsize=1)
def cpp_reader() -> CppReader:
    """The process that this test session shares."""
    return CppReader(program())


@functools.lru_cache
def program(name: str = "check_package") -> Path:
    """A built program; skips the test where it cannot be built, unless EXPORTKIT_REQUIRE_RUNTIME=1."""
    compiler = os.environ.get("CXX", "g++")
    if reason := _what_is_missing(compiler):
        message = f"{reason} to build the C++ reader with (EXPORTKIT_REQUIRE_RUNTIME=1 makes this a failure)"
        pytest.fail(message) if REQUIRED else pytest.skip(message)
    return build(name, compiler, FLAGS)


def build(name: str, compiler: str, flags: Sequence[str]) -> Path:
    """A program of csrc/runtime/tests with all sources that need no torch, compiled once for their content."""
    beside = [SOURCES / f"{part}.{kind}" for part in ("cache", "trust_records") for kind in ("cpp", "h")]
    sources = [*sorted((SOURCES / "package").glob("*.cpp")), *beside[::2], SOURCES / "tests" / f"{name}.cpp"]
    digest = hashlib.sha256(repr((compiler, flags)).encode())
    for source in sorted([*(SOURCES / "package").iterdir(), *(SOURCES / "tests").iterdir(), *beside]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    if (folder / name).exists():
        return folder / name
    partial = CACHE / f"{folder.name}.{os.getpid()}"  # another session may be building the same
    partial.mkdir(parents=True, exist_ok=True)
    objects = [partial / f"{source.stem}.o" for source in sources]
    commands = [[compiler, *flags, "-c", str(one), "-o", str(made)] for one, made in zip(sources, objects)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    _run([compiler, *flags, *map(str, objects), "-lcrypto", "-o", str(partial / name)])
    folder.mkdir(exist_ok=True)
    (partial / name).replace(folder / name)
    shutil.rmtree(partial)
    return folder / name


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _what_is_missing(compiler: str) -> str | None:
    if shutil.which(compiler) is None:
        return f"no {compiler}"
    probe = subprocess.run(
        [compiler, "-std=c++20", "-x", "c++", "-", "-lcrypto", "-o", os.devnull],
        input="#include <openssl/evp.h>\n#include <span>\nint main() {}",
        capture_output=True,
        text=True,
        check=False,
    )
    return None if probe.returncode == 0 else f"{compiler} has no OpenSSL (libssl-dev) or no C++20"
