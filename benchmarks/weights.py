"""How long a package with 1 GiB of weights takes to load, and how much memory; and to swap them.

    python -m benchmarks.weights [--gib 1]

The weights are a table of which a call reads a few rows, so that loading is all there is. Every load is in a process
of its own, after `import torch`, with the package in the page cache: the first with an empty cache of ours, so that the
package is hashed; the later ones with what the first left there. Memory is what the process has more afterwards, the
pages of the package that it touched included. Swapping copies the weights, from tensors in memory; what that takes
without us stands beside it, since it is the pages of new memory that cost.

Prints a Markdown table. On a busy machine the numbers say little: look at `uptime` first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.children import SEARCH_PATH
from exportkit import ExportSpec
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.runtime.native import use_native

COLUMNS = 64
LOAD = """
import json, sys, time
import torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
index = torch.tensor([0, 5])
import exportkit
before, start = resident(), time.perf_counter()
model = exportkit.load(sys.argv[1], device="cpu")
loaded = time.perf_counter()
model(index)
called = time.perf_counter()
found = {"load": loaded - start, "call": called - loaded, "memory": resident() - before}
if len(sys.argv) > 2:
    weights = {"weight": torch.ones(int(sys.argv[2]), 64)}
    start = time.perf_counter()
    model.swap_weights(weights)
    swapped = time.perf_counter()
    copy = weights["weight"].clone()
    found |= {"swap": swapped - start, "copy": time.perf_counter() - swapped}
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1, help="of weights")
    parser.add_argument("--repeat", type=int, default=5, help="later loads")
    options = parser.parse_args()
    rows = int(options.gib * 2**30) // (COLUMNS * 4)
    with tempfile.TemporaryDirectory(prefix="exportkit-bench-") as folder:
        package = Path(folder, "table.pt2")
        # Not drawn at random, which would take longer than all that is measured.
        model = torch.nn.Embedding.from_pretrained(torch.ones(rows, COLUMNS)).eval()
        spec = ExportSpec(model=model, example_inputs=(torch.tensor([0, 5]),), name="table")
        export_aoti(spec, package, TraceOptions(cases=0))
        first = run(package, folder)
        later = [run(package, folder) for _ in range(options.repeat)]
        swaps = [run(package, folder, str(rows)) for _ in range(options.repeat)]
        size = package.stat().st_size
    runtime = "C++ runtime" if use_native() else "torch's Python binding"
    print(
        f"{size / 2**30:.2f} GiB, torch {torch.__version__}, {runtime}, {platform.processor() or platform.machine()}\n"
    )
    print("| | seconds | memory in MB |\n| --- | --- | --- |")
    print(f"| first load | {first['load']:.3f} | {first['memory'] / 1e6:.0f} |")
    seconds, memory = ([each[key] for each in later] for key in ("load", "memory"))
    print(f"| later load, median of {len(later)} | {statistics.median(seconds):.4f} | {max(memory) / 1e6:.0f} |")
    for key, what in (("swap", "swap_weights"), ("copy", "Tensor.clone of as much")):
        print(f"| {what}, median of {len(swaps)} | {statistics.median(each[key] for each in swaps):.3f} | |")


def run(package: Path, folder: str, *arguments: str) -> dict[str, float]:
    """What a process of its own measured."""
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH, "EXPORTKIT_CACHE": f"{folder}/cache"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(package), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"a load failed with exit status {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
