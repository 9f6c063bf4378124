"""exportkit-run in a process of its own, with an environment of its own: no Python, no PATH, no LD_LIBRARY_PATH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exportkit import errors
from exportkit.errors import ExportkitError
from exportkit.runtime.native import library_path
from tests.subprocesses import output_of

PROGRAM = library_path().with_name("exportkit-run")
REQUIRED = os.environ.get("EXPORTKIT_REQUIRE_RUNTIME") == "1"


class Answer(NamedTuple):
    """What it printed, and its exit status."""

    code: int
    document: dict[str, Any]
    said: str  # on stderr


def require_built() -> None:
    """Skips the test where the C++ runtime was not built for this torch, unless it was promised."""
    if not (PROGRAM.exists() and library_path().exists()):
        message = "the C++ runtime is not built (EXPORTKIT_REQUIRE_RUNTIME=1 makes this a failure)"
        pytest.fail(message) if REQUIRED else pytest.skip(message)


def build_example(source: Path, folder: Path, *options: str) -> Path:
    """Builds an example's programs for the runtime, as its CMakeLists.txt says. Returns the folder, where they are."""
    require_built()
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake, which builds the examples: apt-get install cmake")
    configure = ["cmake", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={library_path().parents[2]}"]
    for command in ([*configure, f"-DPython3_EXECUTABLE={sys.executable}", *options], ["cmake", "--build", folder]):
        output_of(*command)
    return folder


def run(*arguments: object, json_output: bool = True, **environment: str) -> Answer:
    """Runs it. $EXPORTKIT_CACHE is that of the test."""
    require_built()
    names = ("EXPORTKIT_CACHE", "EXPORTKIT_POLICY", "OMP_WAIT_POLICY")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    command = [str(PROGRAM), *(["--json"] if json_output else []), *map(str, arguments)]
    done = subprocess.run(
        command,
        env={"HOME": "/nonexistent", **kept, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    assert done.returncode >= 0, f"it died of signal {-done.returncode}\n{done.stderr}"
    assert done.stdout or not json_output, f"it said nothing, exit status {done.returncode}\n{done.stderr}"
    return Answer(done.returncode, json.loads(done.stdout) if json_output else {"text": done.stdout}, done.stderr)


def load(package: Path, *arguments: object) -> dict[str, Any]:
    """Loads and replays a package; an error is raised as exportkit.load would raise it."""
    answer = run(package, *arguments)
    if "error" not in answer.document:
        return answer.document
    error = answer.document["error"]
    kind = getattr(errors, error["kind"])
    assert issubclass(kind, ExportkitError)
    assert error["exit_code"] == answer.code == kind.exit_code
    raise kind(error["message"], hint=error["hint"])
