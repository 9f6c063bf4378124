"""Gigabytes of weights to a GPU: how long a package takes to load and to answer, beside torch's own loader and the bus.

    python -m benchmarks.load_to_gpu --folder build/load_to_gpu          # makes missing packages, and times loads
    python -m benchmarks.load_to_gpu --folder build/load_to_gpu --sweep  # copies of a file only: pinning, lanes, sizes

The model is a stack of Linear layers in bfloat16 with random weights. Every load is in a process of its own, which
has imported torch and started CUDA before, and reads a file that is in the page cache. "first" has an empty cache of
ours, so that the package is hashed; "second" has what the first left there; "plain" is the second load without the C++
runtime, whose weights go the driver's way; "torch" is aoti_load_package with a package of torch's that has the weights
in it, once: it takes long. "copies" are the weights alone, by the C++ runtime and the driver's way, in one process.
"bus" is a copy of as many bytes from pinned memory; "swap" is swap_weights there.

`--sweep` compiles copies_to_gpu.cpp and prints its lines. Prints JSON, and each load on stderr when it has ended. On a
busy machine the numbers say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import exportkit
from benchmarks.children import ROOT, SEARCH_PATH
from exportkit import ExportSpec
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions

WIDTH = 8192
STARTED = f"""
import hashlib, json, sys, time
started = time.perf_counter()
import torch
imported = time.perf_counter()
x = torch.full((1, {WIDTH}), 0.5, dtype=torch.bfloat16, device="cuda")
torch.cuda.synchronize()
seconds = {{"import torch": imported - started, "start CUDA": time.perf_counter() - imported}}
def timed(name, call):
    start = time.perf_counter()
    answer = call()
    torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - start
    return answer
def end(answer):
    seconds["load and answer"] = seconds["load"] + seconds["answer"]
    digest = hashlib.sha256(answer.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    print(json.dumps({{"seconds": seconds, "answer": digest}}))
"""
OURS = """
timed("import exportkit", lambda: __import__("exportkit").load)
import exportkit
model = timed("load", lambda: exportkit.load(sys.argv[1], device="cuda"))
end(timed("answer", lambda: model(x)))
"""
TORCH = """
from torch._inductor import aoti_load_package
model = timed("load", lambda: aoti_load_package(sys.argv[1]))
end(timed("answer", lambda: model(x)))
"""
COPIES = """
from exportkit.package.archive import PackageReader
from exportkit.runtime.native import use_native
from exportkit.runtime.weights import mapped_weights
assert use_native()
reader = PackageReader(sys.argv[1])
weights = mapped_weights(reader)
device = torch.device("cuda", 0)
for turn in range(4):
    staged = timed(f"staged {turn}", lambda: torch.ops.exportkit.copied_together(list(weights.values()), device))
    plain = timed(f"plain {turn}", lambda: {name: weight.to(device) for name, weight in weights.items()})
    bits = [[copy.view(torch.int16) for copy in copies] for copies in (staged, plain.values())]
    assert all(map(torch.equal, *bits))
    del staged, plain, bits
pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
there = torch.empty(2**28, dtype=torch.uint8, device=device)
size = sum(weight.nbytes for weight in weights.values())
def bus():
    for begin in range(0, size, 2**28):
        part = min(2**28, size - begin)
        there[:part].copy_(pinned[:part], non_blocking=True)
for turn in range(4):
    timed(f"bus {turn}", bus)
del pinned, there
from safetensors.torch import save_file
file = sys.argv[1] + ".safetensors"
save_file(weights, file)
import exportkit
with exportkit.load(sys.argv[1], device="cuda") as model:
    for turn in range(3):
        timed(f"swap from tensors {turn}", lambda: model.swap_weights(weights))
        timed(f"swap from a file {turn}", lambda: model.swap_weights(file))
print(json.dumps({"bytes": size, "seconds": seconds}))
"""
WAYS = ("staged", "plain", "bus", "swap from tensors", "swap from a file")


class Stack(torch.nn.Module):
    """Little code with many weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False, **like) for _ in range(layers))
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=(2 / WIDTH) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the two packages, which are kept")
    parser.add_argument("--gb", type=float, default=3.2, help="of weights")
    parser.add_argument("--repeat", type=int, default=3, help="processes for each number")
    parser.add_argument("--without-torch", action="store_true", help="leaves torch's loader out")
    parser.add_argument("--sweep", action="store_true", help="times the ways to copy")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.sweep:
        sweep(options.folder / "bytes", round(options.gb * 1e9))
        return
    ours, stock = options.folder / "ours.pt2", options.folder / "torch.pt2"
    begun = time.perf_counter()
    layers = round(options.gb * 1e9 / (2 * WIDTH**2))
    made = {"ours": make(ours, layers, export)}
    answers: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
        for turn in range(options.repeat):
            cache = {"EXPORTKIT_CACHE": f"{folder}/{turn}"}
            for name in ("first", "second"):
                answers.setdefault(name, []).append(run(name, OURS, ours, **cache))
            answers.setdefault("plain", []).append(run("plain", OURS, ours, **cache, EXPORTKIT_RUNTIME="python"))
        copies = run("copies", COPIES, ours, **cache)
        if not options.without_torch:
            made["torch"] = make(stock, layers, compile_with_torch)
            answers["torch"] = [run("torch", TORCH, stock, TMPDIR=folder)]
    kinds = {name: medians([each["seconds"] for each in runs]) for name, runs in answers.items()}
    said = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "exportkit": exportkit.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "bytes": copies["bytes"],
        "made": made,
        "one answer": len({each["answer"] for runs in answers.values() for each in runs}) == 1,
        "seconds": kinds,
        "copies": {name: rates(copies, name) for name in WAYS},
        "whole run": time.perf_counter() - begun,
    }
    print(json.dumps(said, indent=1))


def export(model: torch.nn.Module, x: torch.Tensor, out: Path) -> None:
    export_aoti(ExportSpec(model=model, example_inputs=(x,), name="stack"), out, TraceOptions("cuda", cases=0))


def compile_with_torch(model: torch.nn.Module, x: torch.Tensor, out: Path) -> None:
    torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=str(out))


def make(out: Path, layers: int, way: Callable[[torch.nn.Module, torch.Tensor, Path], None]) -> float:
    """Makes a package, unless it is there. Returns how many seconds it took. The GPU's memory is free again."""
    start = time.perf_counter()
    if not out.exists():
        torch.manual_seed(0)
        way(Stack(layers).eval(), torch.full((1, WIDTH), 0.5, dtype=torch.bfloat16, device="cuda"), out)
        torch.cuda.empty_cache()
    return time.perf_counter() - start


def run(name: str, code: str, package: Path, **environment: str) -> dict[str, Any]:
    """What a process of its own measured."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED + code, str(package.resolve())],
        env={**os.environ, "PYTHONPATH": SEARCH_PATH, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"a load failed with exit status {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, json.dumps(found), file=sys.stderr, flush=True)
    return found


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in runs), 4) for name in runs[0]}


def rates(copies: dict[str, Any], name: str) -> dict[str, Any]:
    """The seconds of each turn, whose first also takes the GPU's memory, and the rate of the median of the others."""
    seconds = [round(value, 4) for key, value in copies["seconds"].items() if key.startswith(name)]
    return {"seconds": seconds, "GB/s": round(copies["bytes"] / statistics.median(seconds[1:]) / 1e9, 2)}


def sweep(file: Path, size: int) -> None:
    """Compiles and runs copies_to_gpu.cpp with a file of random bytes, which is kept."""
    if not file.exists():
        piece = os.urandom(2**26)
        with file.open("wb") as out:
            for begin in range(0, size, len(piece)):
                out.write(piece[: size - begin])
    libraries = Path(torch.__file__).parent / "lib"
    sources = [ROOT / "benchmarks" / "copies_to_gpu.cpp", ROOT / "csrc" / "runtime" / "staged_copies.cpp"]
    with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
        command = ["g++", "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", "-isystem", libraries.parent / "include", *sources]
        command += [f"-L{libraries}", "-lc10", "-ldl", "-pthread", f"-Wl,-rpath,{libraries}"]
        program = f"{folder}/copies_to_gpu"
        subprocess.run([*command, "-Wl,--allow-shlib-undefined", "-o", program], check=True)
        subprocess.run([program, file], check=True)
    print("huge pages:", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(), file=sys.stderr)


if __name__ == "__main__":
    main()
