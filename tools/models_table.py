"""Exports, packages and verifies the models of the catalogue, and writes docs/evidence/models.md from the results.

    python -m tools.models_table run --device cuda --dtype bfloat16 -o results.json [NAME ...]
    python -m tools.models_table run --device cuda --tf32 -o results.json [NAME ...]
    python -m tools.models_table run --format onnx -o results.json [NAME ...]
    python -m tools.models_table page results.json ... > docs/evidence/models.md

`run` needs exportkit and the libraries of the models; it leaves a model out if its library is missing, and says so. It
writes each result as soon as it is known, and goes on where it was stopped. `page` has a row only for what was run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import tools.modern_models
import tools.more_models  # noqa: F401 (both add to the catalogue)
from tools.generated import in_lines
from tools.model_catalogue import CATALOGUE, Model

_STEPS = {"aoti": ("export", "package", "verify"), "onnx": ("export", "verify")}
_LIBRARIES = {
    "aoti": ("torch", "transformers", "diffusers", "torchao", "timm", "torchvision", "torch_geometric"),
    "onnx": ("torch", "transformers", "diffusers", "onnx", "onnxscript", "onnxruntime"),
}
Results = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What all models of a table are exported for.

    Attributes:
        device: "cpu" or "cuda".
        dtype: The dtype that the models are cast to.
        tf32: Whether eager and the package may round float32 to TF32.
        format: "aoti" for packages, "onnx" for ONNX models.
    """

    device: str = "cpu"
    dtype: str = "float32"
    tf32: bool = False
    format: str = "aoti"

    @property
    def precision(self) -> str:
        """The dtype, in words, and the format if it is not a package."""
        return self.dtype + " with TF32" * self.tf32 + ", ONNX Runtime" * (self.format == "onnx")

    @property
    def column(self) -> str:
        """The title of its column, such as "CUDA TF32"."""
        device = "ONNX" if self.format == "onnx" else self.device.upper()
        return f"{device} {'TF32' if self.tf32 else self.dtype}"

    @property
    def options(self) -> list[str]:
        """The options of `exportkit export`."""
        tf32 = ["--tf32"] if self.tf32 else []
        return ["--format", self.format, "--device", self.device, "--dtype", self.dtype, *tf32]


def run(names: Sequence[str], setup: Setup, output: Path, *, again: bool, jobs: int = 1) -> None:
    """Runs models that the file has no result of, `jobs` at a time, each step in a process of its own."""
    document: Results = {**asdict(setup), "models": {}}
    if output.exists():
        document = json.loads(output.read_text())
    if (found := _setup(document)) != setup:
        sys.exit(f"{output} has results of {found.device} in {found.precision}")
    document["versions"] = {name: version(name) for name in _LIBRARIES[setup.format]}
    document["machine"] = _machine(setup.device)
    wanted = []
    for name in names or CATALOGUE:
        if name in document["models"] and not again:
            continue
        if missing := [module for module in CATALOGUE[name].needs if importlib.util.find_spec(module) is None]:
            print(f"{name}: left out, {', '.join(missing)} is not installed", file=sys.stderr)
            continue
        wanted.append(name)
    with ThreadPool(jobs) as pool:
        for name, result in pool.imap_unordered(lambda name: (name, run_model(CATALOGUE[name], setup)), wanted):
            document["models"][name] = result
            temporary = output.with_suffix(".part")
            temporary.write_text(f"{in_lines(document)}\n")
            temporary.replace(output)
            print(f"{name}: {result['ended']}", file=sys.stderr)


def run_model(model: Model, setup: Setup) -> Results:
    """Returns how far a model came, the seconds of each step, and what the last one said."""
    result: Results = {"seconds": {}}
    with tempfile.TemporaryDirectory(prefix="exportkit-models-") as folder:
        is_onnx = setup.format == "onnx"
        result_file = Path(folder) / ("model.onnx" if is_onnx else "package.pt2")
        artifact = result_file if is_onnx else Path(folder) / "artifact.pt2"
        arguments = {
            "export": [model.source, "-o", artifact, *setup.options],
            "package": [artifact, "-o", result_file],
            "verify": [result_file, "--device", setup.device],
        }
        for step in _STEPS[setup.format]:
            started = time.monotonic()
            command = [sys.executable, "-m", "exportkit", step, *map(str, arguments[step]), "--json"]
            done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
            result["seconds"][step] = round(time.monotonic() - started, 1)
            answer = _json(done.stdout)
            if done.returncode != 0:
                return {
                    **result,
                    "ended": f"{step} failed",
                    "exit_code": done.returncode,
                    "said": said(done.stdout, done.stderr),
                }
            if step == _STEPS[setup.format][-2]:
                result["megabytes"] = round(result_file.stat().st_size / 1e6, 2)
        return {**result, "ended": "ok", "calls": len(answer["checks"])}


def page(documents: Iterable[Results]) -> str:
    """Returns docs/evidence/models.md: a row for models of a kind that went alike, and a column for each setup.

    Where two versions of torch ran a model, the newer one's result stands.
    """
    in_order = sorted(documents, key=lambda document: _numbers(document["versions"]["torch"]))
    columns: dict[Setup, dict[str, Results]] = {}
    torches: dict[Setup, set[str]] = {}
    for document in in_order:
        torch = ".".join(document["versions"]["torch"].split(".")[:2])
        column = columns.setdefault(_setup(document), {})
        for name, result in document["models"].items():
            column[name] = {**result, "torch": torch}
            torches.setdefault(_setup(document), set()).add(torch)
    setups = sorted(columns, key=lambda setup: (setup.format, setup.device, _DTYPES.index(setup.dtype), setup.tf32))
    lines = [
        _INTRODUCTION,
        f"| kind | models | {' | '.join(setup.column for setup in setups)} |",
        f"| --- | --- |{' --- |' * len(setups)}",
    ]
    reasons: dict[str, int] = {}
    alike: dict[str, dict[str, list[str]]] = {}  # by kind and cells, the titles
    for name, model in CATALOGUE.items():
        results = [columns[setup].get(name) for setup in setups]
        if any(results):
            cells = "|".join(_cell(result, reasons) for result in results)
            alike.setdefault(model.kind, {}).setdefault(cells, []).append(model.title)
    lines += [f"| {kind} | {'; '.join(titles)} |{cells}|" for kind, of in alike.items() for cells, titles in of.items()]
    good = [sum(result["ended"] == "ok" for result in columns[setup].values()) for setup in setups]
    counts = [f"{passed} of {len(columns[setup])}" for passed, setup in zip(good, setups)]
    lines += [f"| verified | | {' | '.join(counts)} |"]
    lines += [f"| torch | | {' | '.join(', '.join(sorted(torches[setup])) for setup in setups)} |", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


_LONGEST = 100  # letters of a reason
_DTYPES = ("float32", "bfloat16", "float16")
_INTRODUCTION = """\
# Models that were exported

Written by `make docs` from [real runs](../../benchmarks/models) of `python -m tools.models_table`. The models are
[small, with random weights](../../tools/model_catalogue.py); the batch varies, and often the length or the image
size. ✓: exported, packaged, and twelve calls verified against eager at other sizes. A number: the reason below. An
empty cell: not run.
"""


def _cell(result: Results | None, reasons: dict[str, int]) -> str:
    """Returns a tick, the number of a reason, which is added to the others, or nothing."""
    if result is None or result["ended"] == "ok":
        return "✓" if result else ""
    first, *others = result["said"].splitlines()
    detail = f" {others[0].strip()}" if others and first.endswith(":") else ""
    told = re.sub(r":? `[^`]*`|[\w/]+/(?=\w+\.py:)", "", f"{first}{detail}")  # the file's name and the line suffice
    told = told if len(told) <= _LONGEST else f"{told[:_LONGEST].rpartition(' ')[0]} ..."
    reason = f"torch {result['torch']}, {result['ended']}: {told}"
    return str(reasons.setdefault(reason, len(reasons) + 1))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".")]


def _setup(document: Results) -> Setup:
    return Setup(**{field.name: document[field.name] for field in fields(Setup) if field.name in document})


def _environment() -> Mapping[str, str]:
    # A model makes itself in a process for export and another for verify. Neither may ask the network for anything.
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def said(stdout: str, stderr: str) -> str:
    """Returns the message of a command that failed, from what it printed."""
    answer = _json(stdout)
    if isinstance(answer, dict) and "error" in answer:
        return "\n".join(filter(None, (answer["error"]["message"], answer["error"]["hint"])))
    report = (answer or {}).get("verification") or answer or {}
    for check in report.get("checks", ()):
        if check["verdict"]["exit_code"] != 0:
            return f"{check['against']}, {check['label']}: {check['verdict']['message']}"
    lines = stderr.strip().splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(("error:", "FAILED"))), -20)
    return "\n".join(lines[start:])


def version(name: str) -> str | None:
    """Returns the version of a package, if it is installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine(device: str) -> str:
    if device == "cpu":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(device)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("names", nargs="*", metavar="NAME", help="models to run; default: all")
    running.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    running.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    running.add_argument("--format", choices=list(_STEPS), default="aoti", help="make packages, or ONNX models")
    running.add_argument("--tf32", action="store_true", help="let eager and the packages round float32 to TF32")
    running.add_argument("-o", "--output", type=Path, required=True)
    running.add_argument("--again", action="store_true", help="run models that have a result as well")
    running.add_argument("--jobs", type=int, default=1, metavar="N", help="run N models at a time")
    writing = commands.add_parser("page")
    writing.add_argument("results", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        if unknown := [name for name in options.names if name not in CATALOGUE]:
            parser.error(f"there is no model {', '.join(unknown)}; there is {', '.join(CATALOGUE)}")
        if options.tf32 and options.dtype != "float32":
            parser.error("--tf32 is for --dtype float32")
        setup = Setup(options.device, options.dtype, options.tf32, options.format)
        run(options.names, setup, options.output, again=options.again, jobs=options.jobs)
    else:
        print(page(json.loads(path.read_text()) for path in options.results), end="")


if __name__ == "__main__":
    main()
