"""Takes models of real sizes from export to a loaded package, and writes docs/models.md from the results.

    python -m tools.sizes_table run --folder /tmp/sizes -o results.json --gpus 0,1,2,3 --minutes 9 [NAME ...]
    python -m tools.sizes_table run --folder /tmp/sizes -o results.json --small
    python -m tools.sizes_table page results.json > docs/models.md

Each GPU takes one model after the other, with its share of the cores. Each step is a process of its own, whose memory
is watched. A result is written as soon as it is known, and a run goes on where it was stopped. `--small` takes small
models of the same architectures the same way on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.generated import in_lines
from tools.models_table import said, version
from tools.size_catalogue import SIZED
from tools.size_page import page
from tools.watched_memory import GpuMemory, gpu_memory, run_watched

Results = dict[str, Any]
ROOT = Path(__file__).parents[1]
STEPS = ("export", "package", "verify", "load", "bench")
_STEP_SECONDS = 330.0
_LOAD = """
import json, sys, time
import torch, exportkit
device = sys.argv[2]
if device == "cuda":
    torch.zeros(1, device=device)
begin = time.perf_counter()
model = exportkit.load(sys.argv[1], device=device)
if device == "cuda":
    torch.cuda.synchronize()
loaded = time.perf_counter()
call = next(iter(model.cases)).calls[0]
model(*call.args, **call.kwargs)
if device == "cuda":
    torch.cuda.synchronize()
print(json.dumps({"load": loaded - begin, "call": time.perf_counter() - loaded}))
"""
_CONTEXT = """
import time, torch
for dtype in (torch.bfloat16, torch.float64):
    x = torch.ones(64, 64, device="cuda", dtype=dtype)
    (x @ x).sum().item()
time.sleep(1)
"""


@dataclass
class Run:
    """A run of the catalogue.

    Attributes:
        output: The file of the results.
        folder: Where artifacts and packages are made, and removed.
        small: Whether the models are small.
        gpus: The GPUs, or none for the CPU.
        end: When no step may run any more, by the monotonic clock.
        again: Whether to run what has a result.
    """

    output: Path
    folder: Path
    small: bool
    gpus: Sequence[int]
    end: float
    again: bool = False
    document: Results = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device(self) -> str:
        """The device of the models."""
        return "cuda" if self.gpus else "cpu"

    def write(self, name: str, result: Results) -> None:
        """Writes what is known of a model."""
        with self.lock:
            self.document["models"][name] = result
            temporary = self.output.with_suffix(".part")
            temporary.write_text(f"{in_lines(self.document)}\n")
            temporary.replace(self.output)

    def all(self, names: Sequence[str]) -> None:
        """Runs models, the largest first."""
        self.document = json.loads(self.output.read_text()) if self.output.exists() else {"models": {}}
        self.document |= {
            "device": self.device,
            "small": self.small,
            "versions": {name: version(name) for name in ("torch", "transformers", "triton")},
            "cores": _cores_of(len(self.gpus) or 1),
        }
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in sorted(names, key=lambda name: -SIZED[name].billions):
            if self.again or self.document["models"].get(name, {}).get("ended") != "ok":
                waiting.put(name)
        with gpu_memory() as used:
            if self.gpus:
                self._look_at_the_machine(used)
            workers = [threading.Thread(target=self._work, args=(waiting, gpu, used)) for gpu in self.gpus or (None,)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

    def _look_at_the_machine(self, used: GpuMemory) -> None:
        import torch

        self.document["machine"] = torch.cuda.get_device_properties(0).name
        command = [sys.executable, "-c", _CONTEXT]
        before = used.used.get(self.gpus[0], 0)
        empty = run_watched(command, env=self._environment(self.gpus[0]), timeout=120, gpu=self.gpus[0], used=used)
        self.document["context"] = {"before": before / 1e9, **empty.peaks.rounded()}

    def _work(self, waiting: queue.SimpleQueue[str], gpu: int | None, used: GpuMemory) -> None:
        while time.monotonic() < self.end:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            result = self._model(name, gpu, used)
            self.write(name, result)
            print(f"{name}: {result['ended']} {result['seconds']}", file=sys.stderr, flush=True)

    def _model(self, name: str, gpu: int | None, used: GpuMemory) -> Results:
        """Takes a model through all steps, and returns what was seen of each."""
        result: Results = {"gpu": gpu, "seconds": {}, "memory": {}, "trace": {}}
        artifact, package = (self.folder / f"{name}{end}.pt2" for end in ("_aoti", ""))
        measured = self.folder / f"{name}.json"
        try:
            for step in STEPS:
                limit = min(self.end - time.monotonic(), _STEP_SECONDS)
                if limit <= 0:
                    return {**result, "ended": f"no time for {step}"}
                command = self._command(step, SIZED[name].source, artifact, package, measured)
                if gpu is not None:
                    command = ["taskset", "-c", _cores(self.gpus.index(gpu), len(self.gpus)), *command]
                done = run_watched(command, env=self._environment(gpu), timeout=limit, gpu=gpu or 0, used=used)
                result["seconds"][step] = done.seconds
                result["memory"][step] = done.peaks.rounded()
                result["trace"][step] = done.trace
                if done.code != 0:
                    ended = f"{step} {'took too long' if done.code is None else 'failed'}"
                    return {**result, "ended": ended, "exit_code": done.code, "said": said(done.stdout, done.stderr)}
                self._note(step, done.stdout, artifact, measured, result)
                self.write(name, {**result, "ended": f"{step} done"})
            return {**result, "ended": "ok"}
        finally:
            for file in (artifact, package, measured):
                file.unlink(missing_ok=True)

    def _note(self, step: str, stdout: str, artifact: Path, measured: Path, result: Results) -> None:
        """Keeps what a step has found."""
        if step == "export":
            answer = json.loads(stdout)
            weights = answer["manifest"]["weights"]
            result["weights"] = sum(_nbytes(weight) for weight in weights) / 1e9
            result["parameters"] = sum(_elements(weight) for weight in weights) / 1e9
            result["dimensions"] = {
                each["name"]: each["max"] for each in answer["manifest"]["methods"][0]["call"]["dimensions"]
            }
            result["package"] = answer["file"]["size"] / 1e9
        elif step == "package":
            artifact.unlink()  # the disk may not have room for all
        elif step == "verify":
            result["calls"] = len(json.loads(stdout)["checks"])
        elif step == "load":
            result["loaded"] = {key: round(value, 3) for key, value in json.loads(stdout).items()}
        else:
            row = json.loads(measured.read_text())["rows"][0]
            result["speed"] = {
                each["name"]: {
                    key: round(each[key]["median"], 4) for key in ("call", "kernels") if each.get(key) is not None
                }
                for each in row["measurements"]
            }

    def _command(self, step: str, source: str, artifact: Path, package: Path, measured: Path) -> list[str]:
        kwargs = ["--model-kwargs", json.dumps({"small": True})] if self.small else []
        program = [sys.executable, "-m", "exportkit"]
        library = ["--op-library", module] if (module := SIZED[package.stem].library) else []
        if step == "export":
            cases = ["--cases", "3"]
            arguments = ["export", source, *kwargs, "--device", self.device, *cases, *library, "-o", str(artifact)]
        elif step == "package":
            # `verify` comes next, and does what `package` would do.
            arguments = ["package", str(artifact), "--no-verify", "-o", str(package), *library]
        elif step == "verify":
            arguments = ["verify", str(package), "--against", "cases", "--device", self.device]
        elif step == "load":
            return [sys.executable, "-c", _LOAD, str(package), self.device]
        else:
            sizes = json.loads(self.output.read_text())["models"][package.stem]["dimensions"]
            size = ",".join(f"{name}={value}" for name, value in sizes.items())
            against = ["--against", "eager", "--against", "compile", "--size", size, "--seconds", "1"]
            return [*program, "bench", str(package), "--model", source, *library, *against, "--device", self.device,
                    "-o", str(measured)]  # fmt: skip
        return [*program, *arguments, "--json"]

    def _environment(self, gpu: int | None) -> dict[str, str]:
        folders = (str(ROOT), str(ROOT / "examples" / "paged_cache"), os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, folders))
        # A cache of its own, so that no model finds the code of another, nor a run that of an earlier one.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"inductor-{gpu}"), "PYTHONPATH": path}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return {**os.environ, **offline, **own, **visible}


def _elements(weight: Results) -> int:
    count = 1
    for size in weight["shape"]:
        count *= size
    return count


def _nbytes(weight: Results) -> int:
    bits = {"bfloat16": 16, "float16": 16, "float32": 32, "int64": 64, "float64": 64, "int32": 32}
    return _elements(weight) * bits.get(weight["dtype"], 8) // 8


def _cores_of(workers: int) -> int:
    return len(os.sched_getaffinity(0)) // workers


def _cores(worker: int, workers: int) -> str:
    """Returns a worker's share of the cores, as taskset takes it."""
    own = sorted(os.sched_getaffinity(0))
    share = len(own) // workers
    return ",".join(map(str, own[worker * share : (worker + 1) * share]))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("names", nargs="*", metavar="NAME", help="models to run; default: all")
    running.add_argument("--folder", type=Path, required=True, help="for artifacts and packages")
    running.add_argument("-o", "--output", type=Path, required=True)
    running.add_argument("--gpus", default="", help="such as 0,1,2,3; default: the CPU")
    running.add_argument("--small", action="store_true", help="small models of the same architectures")
    running.add_argument("--minutes", type=float, default=60.0)
    running.add_argument("--again", action="store_true", help="run models that have a result as well")
    writing = commands.add_parser("page")
    writing.add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "page":
        print(page(json.loads(options.results.read_text())), end="")
        return
    if unknown := [name for name in options.names if name not in SIZED]:
        parser.error(f"there is no model {', '.join(unknown)}; there is {', '.join(SIZED)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    gpus = [int(number) for number in options.gpus.split(",") if number]
    end = time.monotonic() + 60 * options.minutes
    Run(options.output, options.folder, options.small, gpus, end, options.again).all(options.names or list(SIZED))


if __name__ == "__main__":
    main()
