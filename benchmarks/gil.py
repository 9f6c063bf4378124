"""How long another thread of Python stalls while a package loads and runs, and what a call costs beside its code.

    python -m benchmarks.gil artifacts/arr_coc.pt2

Once for each runner that EXPORTKIT_RUNTIME chooses, in a process of its own. The other thread sleeps for 0.2 ms at a
time and notes how late it is woken; "idle" is how late that is where nothing runs. Nobody is made to yield to it (the
switch interval is 1000 s), so that it sees how long the GIL is really held. The first load of the process, which loads
the operators, counts as well as the second. "Checks and structure" is what a
call takes beyond the runner's own on inputs that were prepared, for the smallest case.

Prints a Markdown table. On a busy machine the numbers say little: look at `uptime` first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.children import SEARCH_PATH

RUNNERS = ("cpp", "python")

MEASURE = """
import json, statistics, sys, threading, time
import torch
import exportkit

def stall(call):
    late, done = [0.0], threading.Event()
    def watch():
        before = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0002)
            now = time.perf_counter()
            late.append(now - before - 0.0002)
            before = now
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    done.set()
    watcher.join()
    return result, 1e3 * max(late)

def median(call, seconds=1.0):
    times, end = [], time.perf_counter() + seconds
    while not times or times[-1][1] < end:
        start = time.perf_counter()
        call()
        times.append((start, time.perf_counter()))
    return 1e3 * statistics.median(stop - start for start, stop in times)

import exportkit.runtime.loader  # importing takes its time, once
sys.setswitchinterval(1000)
found = {"idle": stall(lambda: time.sleep(0.5))[1]}
loads = [stall(lambda: exportkit.load(sys.argv[1], device="cpu")) for _ in range(2)]
model, found["load"] = loads[-1][0], max(late for _, late in loads)
case = max(model.cases, key=lambda case: sum(tensor.numel() for tensor in case.args))
call = lambda: model(*case.args, **case.kwargs)
call()
found["run"] = max(stall(call)[1] for _ in range(10))
found["call"] = median(call)
small = min(model.cases, key=lambda case: sum(tensor.numel() for tensor in case.args))
flat = model._inputs.prepare(small.args, small.kwargs)
torch.set_num_threads(1)
own = median(lambda: model._runner.run(flat))
found["overhead"] = 1e3 * (median(lambda: model(*small.args, **small.kwargs)) - own)
print(json.dumps(found))
"""


def measure(package: Path, runner: str, cache: str) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(package)],
        env={**os.environ, "PYTHONPATH": SEARCH_PATH, "EXPORTKIT_RUNTIME": runner, "EXPORTKIT_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"the {runner} runner failed with exit status {result.returncode}:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    package = parser.parse_args().package
    print("| runner | stall idle | stall while it loads | stall while it runs | a call | of it, checks and structure |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as cache:
        for runner in RUNNERS:
            found = measure(package, runner, cache)
            stalls = " | ".join(f"{found[when]:.1f} ms" for when in ("idle", "load", "run"))
            print(f"| {runner} | {stalls} | {found['call']:.1f} ms | {found['overhead']:.1f} us |")


if __name__ == "__main__":
    main()
