"""Takes a library from the list of its operators to a package that runs without it, by the commands of exportkit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exportkit.runtime.native import library_path
from tools.generated import ROOT
from tools.libraries.library import Library

STEPS = ("list", "check", "export", "package", "verify", "load", "run")
"""What is tried, in order. `run` is exportkit-run's; the steps after `check` need the step before."""

_SECONDS = 900
_CHECK_SECONDS = 300
_PROGRAM = library_path().with_name("exportkit-run")
Result = dict[str, Any]


def find(library: str) -> str | None:
    """Returns what `--op-library` takes: a module's name, or the file below a folder of sys.path. None: it is not here.

    Args:
        library: The module, or the file's path below the folder, which may be a pattern: "natten/_C*.so".
    """
    if not library.endswith(".so"):
        return library if importlib.util.find_spec(library.partition(".")[0]) else None
    return next((str(file) for folder in sys.path for file in Path(folder).glob(library)), None)


def missing(row: Library) -> str | None:
    """Returns why a row cannot be tried here."""
    if row.spec is None:
        return row.note
    name, _, version = row.distribution.partition("==")
    if find(row.op_library) is None:
        return f"it is not installed: pip install --no-deps {row.distribution}"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # it was built in place
        return None
    same = version in ("", found.partition("+")[0])  # a build for a device has it in its version: 0.28.0+cpu
    return None if same else f"{name} {found} is installed, the row is about {version}"


def tried(row: Library, device: str, steps: tuple[str, ...] = STEPS) -> Result:
    """Returns what each step said: a step is {"ok": whether it went well, "said": a sentence}.

    Args:
        row: The library. It is installed.
        device: "cpu" or "cuda".
        steps: Those to take.
    """
    if row.spec is None:
        raise ValueError(f"{row.name} has no model: {row.note}")
    result: Result = {"name": row.name, "device": device, "torch": torch.__version__, "steps": {}, "libraries": []}
    model, library = f"{row.spec.__module__}:{row.spec.__name__}", find(row.op_library) or row.op_library
    with tempfile.TemporaryDirectory(prefix="exportkit-libraries-") as folder:
        artifact, package, answer = (Path(folder, name) for name in ("artifact.pt2", "package.pt2", "answer.pt"))
        take: dict[str, Callable[[], str]] = {
            "list": lambda: _listed(_exportkit("ops", "list", library)),
            "check": lambda: _checked(model, library, device),
            "export": lambda: _export(model, library, device, artifact),
            "package": lambda: _package(artifact, library, package, result),
            "verify": lambda: _verify(package, model, device),
            "load": lambda: _load(package, answer, model, library, device),
            "run": lambda: _run(package, device),
        }
        for step in steps:
            try:
                result["steps"][step] = {"ok": True, "said": take[step]()}
            except _Failed as failed:
                result["steps"][step] = {"ok": False, "said": str(failed)}
                if step in STEPS[2:]:
                    break
    return result


class _Failed(Exception):
    """A step did not go well. The message is one sentence."""


def _listed(document: Any) -> str:
    return f"{len(document['operators'])} operators"


def _checked(model: str, library: str, device: str) -> str:
    command = ("ops", "check", model, "--op-library", library, "--device", device)
    document = _exportkit(*command, seconds=_CHECK_SECONDS, may_fail=True)
    operators = document["operators"]
    found = [found for each in operators for found in each["report"]["findings"] if found["severity"] == "broken"]
    reasons = [each["not_checked"] for each in operators if each["not_checked"]]
    if found or reasons:
        raise _Failed(", ".join(dict.fromkeys(each["check"] for each in found)) or reasons[0])
    return f"{len(operators)} checked"


def _export(model: str, library: str, device: str, artifact: Path) -> str:
    _exportkit("export", model, "--op-library", library, "--device", device, "-o", artifact)
    return f"{artifact.stat().st_size} bytes"


def _package(artifact: Path, library: str, package: Path, result: Result) -> str:
    document = _exportkit("package", artifact, "--op-library", library, "-o", package)
    result["libraries"] = [Path(each["record"]).name for each in document["manifest"]["libraries"]]
    return f"{len(document['verification']['checks'])} calls agree"


def _verify(package: Path, model: str, device: str) -> str:
    document = _exportkit("verify", package, "--model", model, "--device", device)
    return f"{len(document['checks'])} calls agree"


def _load(package: Path, answer: Path, model: str, library: str, device: str) -> str:
    """Calls the package where the library cannot be imported, and compares with eager, which answered where it can."""
    call = [sys.executable, "-m", "tools.libraries.one_call"]
    _python([*call, "save", model, library, device, answer], os.pathsep.join([str(ROOT), *sys.path]))
    hidden = sorted(_modules_of(library))
    return _python([*call, "compare", package, device, answer, *hidden], str(ROOT)).stdout.strip()


def _modules_of(library: str) -> set[str]:
    """Returns the names by which a library can be imported, in whichever folder of sys.path it lies."""
    if not library.endswith(".so"):
        return {library.partition(".")[0]}
    return {Path(library).relative_to(folder).parts[0] for folder in sys.path if folder and library.startswith(folder)}


def _run(package: Path, device: str) -> str:
    if not _PROGRAM.exists():
        raise _Failed("the C++ runtime is not built")
    command = [_PROGRAM, package, "--device", device, "--json"]
    kept = {name: os.environ[name] for name in ("EXPORTKIT_CACHE", "LD_LIBRARY_PATH") if name in os.environ}
    document = _answered(_process(command, {"HOME": "/nonexistent", **kept}, _SECONDS))
    return f"{len(document['cases'])} calls agree"


def _exportkit(*arguments: object, seconds: int = _SECONDS, may_fail: bool = False) -> Any:
    """Runs a command of exportkit where the library can be imported. Returns its document."""
    command = [sys.executable, "-m", "exportkit", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return _answered(_process(command, environment, seconds), may_fail=may_fail)


def _python(command: list[Any], path: str) -> subprocess.CompletedProcess[str]:
    done = _process(command, {**os.environ, "PYTHONPATH": path}, _SECONDS)
    if done.returncode:
        raise _Failed(_sentence(done.stderr.strip().splitlines()[-1:]))
    return done


def _process(command: list[Any], environment: dict[str, str], seconds: int) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    try:
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=seconds, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"It was not done after {seconds} seconds.") from None


def _answered(done: subprocess.CompletedProcess[str], *, may_fail: bool = False) -> Any:
    """Returns the document that a command printed; of one that failed its message is raised."""
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise _Failed(f"exit {done.returncode}: {_sentence(done.stderr.strip().splitlines()[-1:])}") from None
    if error := document.get("error"):
        raise _Failed(_sentence(error["message"].splitlines()))
    if done.returncode and not may_fail:
        checks = (document.get("verification") or document).get("checks") or []
        failed = [each["verdict"]["message"] for each in checks if each["verdict"]["exit_code"]]
        raise _Failed(_sentence((failed or [f"exit {done.returncode}"])[0].splitlines()))
    return document


def _sentence(lines: list[str]) -> str:
    """Returns the first line, and the second where the first only announces it, without the folders of this machine."""
    first, second, *_ = *lines, "", ""
    return re.sub(r"(?<![\w.])/(\S*/)+", "", f"{first} {second.strip()}" if first.endswith(":") else first)
