"""Exports and loads packages with every torch, and writes the table of it in docs/fleet.md.

    python -m tools.torch_matrix run PYTHON ... [--model operators] [--folder build/torches]
    python -m tools.torch_matrix page

`run` needs interpreters with different torches, and with what exportkit needs; exportkit comes from this work tree.
Each exports, packages and verifies the models below, and then runs the packages of all of them, with the C++ runtime
if it was built for that torch (EXPORTKIT_RUNTIME_TORCHES), and with torch's own binding. The packages of tests/golden
count as made by the pinned torch. The bits of all answers are compared with those of the torch that made the package.
Where they differ, `exportkit verify` compares with the recorded answers.

`run` goes on where it was stopped: what is in the folder is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exportkit.libraries import LIBRARY_DIR
from exportkit.support import PINNED_TORCH
from tools.generated import DOCS, ROOT, in_lines, with_section

RESULTS = ROOT / "benchmarks" / "torches" / "cpu.json"
DOCUMENT = DOCS / "fleet.md"
GOLDEN = ROOT / "tests" / "golden"
RUNTIMES = {"cpp": "NativeRunner", "python": "ContainerRunner"}
MODELS = {
    "operators": "tests/export/export_models.py:patches",
    "state": "tests/export/state_models.py:decoder",
    "recurrent": "tests/recurrent/recurrent_models.py:both",
}
ONNX = "ONNX"  # exported from the model "operators", and run by ONNX Runtime
QUICKLY = ("--no-edge-cases", "--cases", "2")
Results = dict[str, Any]


class Torch:
    """An interpreter with a torch, and the folder of what it makes."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.version = self._run([python, "-c", "import torch; print(torch.__version__)"]).stdout.strip()
        if not self.version:
            sys.exit(f"{python} has no torch: give interpreters that import torch")
        self.minor = ".".join(self.version.split(".")[:2])
        self.folder = folder / self.minor
        self.folder.mkdir(parents=True, exist_ok=True)

    def _run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        cache = str(self.folder / "cache") if hasattr(self, "folder") else ""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "EXPORTKIT_CACHE": cache, **environment}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def exportkit(self, *arguments: str | Path) -> str | None:
        """Runs a command of exportkit. Returns why it failed, or None."""
        done = self._run([self.python, "-m", "exportkit", *map(str, arguments)])
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return f"exit {done.returncode}: {lines[-1] if lines else ''}" if done.returncode else None

    def export(self, name: str) -> str:
        """Exports a model and packages it, which verifies it. Returns "verified", or what failed."""
        package, artifact, kept = self.package(name), self.folder / f"{name}.artifact.pt2", self.folder / f"{name}.txt"
        if kept.exists():
            return kept.read_text()
        if name == ONNX:
            package = package.with_suffix(".onnx")
            steps = [("export", MODELS["operators"], *QUICKLY, "--format", "onnx", "-o", package), ("verify", package)]
        else:
            steps = [("export", MODELS[name], *QUICKLY, "-o", artifact), ("package", artifact, "-o", package)]
        ended = "verified"
        for step in steps:
            if said := self.exportkit(*step):
                package.unlink(missing_ok=True)
                ended = f"{step[0]}: {said}"
                break
        artifact.unlink(missing_ok=True)
        kept.write_text(ended)
        return ended

    def package(self, name: str) -> Path:
        """The path of a package that it made."""
        return self.folder / f"{name}.pt2"

    def packages(self) -> dict[str, Path]:
        """What it made, by name."""
        found = {name: path for name in MODELS if (path := self.package(name)).exists()}
        if self.minor == PINNED_TORCH:
            found |= {path.stem: path for path in sorted(GOLDEN.glob("*.pt2"))}
        return found

    @property
    def runtimes(self) -> list[str]:
        """What can run code with it: RUNTIMES, or only torch's own binding."""
        built = (LIBRARY_DIR / f"torch{self.minor}" / "libexportkit_runtime.so").exists()
        return list(RUNTIMES) if built else ["python"]

    def replay(self, packages: Iterable[Path], runtime: str) -> Results:
        """Runs packages in one process. Returns the results of `tools.torch_replay` by path."""
        kept = self.folder / f"replayed-{runtime}.json"
        found: Results = json.loads(kept.read_text()) if kept.exists() else {}
        if new := [str(package) for package in packages if str(package) not in found]:
            done = self._run([self.python, "-m", "tools.torch_replay", *new], EXPORTKIT_RUNTIME=runtime)
            if done.returncode:
                sys.exit(f"torch {self.minor} with the runtime {runtime}: {done.stderr}")
            said: Results = json.loads(done.stdout.splitlines()[-1])
            assert said["runtime"] == RUNTIMES[runtime], said
            found |= said["packages"]
            kept.write_text(json.dumps(found))
        return found


def run(pythons: Sequence[str], folder: Path, output: Path, models: Sequence[str]) -> None:
    """Makes the matrix and writes it."""
    torches = [Torch(python, folder) for python in pythons]
    torches.sort(key=lambda each: tuple(map(int, each.minor.split("."))))
    exports = {each.minor: {name: _said(each, name, each.export(name)) for name in models} for each in torches}
    packages = [path for each in torches for path in each.packages().values()]
    answers = {(each.minor, runtime): each.replay(packages, runtime) for each in torches for runtime in each.runtimes}
    loads = {
        each.minor: {runtime: _loaded(each, torches, runtime, answers) for runtime in each.runtimes} for each in torches
    }
    document = {
        "machine": {"platform": platform.platform(), "cpu": _cpu()},
        "torches": {each.minor: each.version for each in torches},
        "exports": exports,
        "loads": loads,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(".part")
    temporary.write_text(f"{in_lines(document)}\n")
    temporary.replace(output)


def _loaded(by: Torch, makers: Sequence[Torch], runtime: str, answers: Mapping[tuple[str, str], Results]) -> Results:
    """Returns for each maker, and each of its packages, "same bits", "verified", or what went wrong."""
    results: Results = {}
    for maker in makers:
        results[maker.minor] = {}
        for name, path in maker.packages().items():
            answer, made = answers[by.minor, runtime][str(path)], answers[maker.minor, "python"][str(path)]
            said = answer.get("error") or ("same bits" if answer == made else None)
            said = said or by.exportkit("verify", path, "--against", "cases") or "verified"
            results[maker.minor][name] = _said(by, f"{name} of {maker.minor} with {runtime}", said)
    return results


def _said(torch: Torch, what: str, result: Any) -> Any:
    print(f"torch {torch.minor}: {what}: {result}", file=sys.stderr, flush=True)
    return result


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def page(document: Mapping[str, Any]) -> str:
    """Returns the section of docs/fleet.md: a row for each torch that made packages, a column for each that ran."""
    torches = document["torches"]
    lines = [
        f"| made by torch | exported | {' | '.join(f'in {minor}' for minor in torches)} |",
        f"| --- | --- |{' --- |' * len(torches)}",
    ]
    for maker in torches:
        ended = document["exports"][maker]
        good = sum(result == "verified" for result in ended.values())
        cells = [_cell(document["loads"][by], maker) for by in torches]
        lines.append(f"| {torches[maker]} | {good}/{len(ended)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(loads: Mapping[str, Any], maker: str) -> str:
    """How many packages ran with each runtime, and an asterisk where an answer had other bits."""
    found = [of_maker[maker] for of_maker in loads.values()]
    names = found[0].keys()
    ran = [name for name in names if all(each[name] in ("same bits", "verified") for each in found)]
    same = [name for name in ran if all(each[name] == "same bits" for each in found)]
    return f"{len(ran)}/{len(names)}" + "*" * (ran != same)


def write() -> None:
    """Writes the section of docs/fleet.md."""
    DOCUMENT.write_text(with_section(DOCUMENT.read_text(), "torches", page(json.loads(RESULTS.read_text()))))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("pythons", nargs="+", metavar="PYTHON")
    runs.add_argument("--model", action="append", choices=[*MODELS, ONNX], help="which to export; default: all")
    runs.add_argument("--folder", type=Path, default=ROOT / "build" / "torches")
    runs.add_argument("-o", "--output", type=Path, default=RESULTS)
    commands.add_parser("page")
    options = parser.parse_args()
    if options.command == "page":
        write()
    else:
        run(options.pythons, options.folder.resolve(), options.output, options.model or [*MODELS, ONNX])


if __name__ == "__main__":
    main()
