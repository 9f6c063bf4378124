"""What a call costs beside a model that computes next to nothing: microseconds, by every way to call it.

    python -m benchmarks.small_calls --folder build/small_calls [-o results.json]

"Compiled code" is the same .so, called by torch's own runner from C++ and from Python: what exportkit's ways add are
their checks, their tensors and their locks. calls.cpp times C++ and C, and is built with CMake. The server has one core
and the client another; a request is a batch of 2, and the next one waits for its answer.

The package is made in --folder, unless it is there. Each way runs in turns with the others of its process; the table
has the medians of the rounds and, beside them, the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import tritonclient.grpc
import tritonclient.http

import exportkit
from benchmarks.serve.running import ROOT, free_port, running
from benchmarks.small_calls.model import spec
from exportkit.bench.runs import describe

ROUNDS, CALLS, REQUESTS = 40, 1000, 200
Times = dict[str, list[float]]


def make(folder: Path) -> tuple[Path, Path]:
    """Makes the package with its weights inside the code, which torch's runner needs. Returns it and its code."""
    exported, package, code = folder / "exported.pt2", folder / "small.pt2", folder / "model.so"
    folder.mkdir(parents=True, exist_ok=True)
    if not package.exists():
        source = "benchmarks/small_calls/model.py:spec"
        for command in (
            ["export", source, "--embed-weights", "-o", str(exported)],
            ["package", str(exported), "-o", str(package)],
        ):
            subprocess.run([sys.executable, "-m", "exportkit", *command], check=True, cwd=ROOT, stdout=sys.stderr)
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("model.wrapper.so"))
        code.write_bytes(archive.read(name))
    return package, code


def in_turns(ways: Mapping[str, Callable[[], object]], calls: int) -> Times:
    """Returns the microseconds a call takes in each round, by way."""
    times: Times = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return times


def from_cpp(folder: Path, package: Path, code: Path) -> Times:
    """Builds and runs calls.cpp."""
    build = folder / "build"
    prefix = exportkit.__path__[0]
    source = ["-S", str(Path(__file__).parent), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    found = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DPython3_EXECUTABLE={sys.executable}"]
    for command in (["cmake", *source, *found], ["cmake", "--build", str(build)]):
        subprocess.run(command, check=True, stdout=sys.stderr)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [build / "calls", package, code], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    times: Times = json.loads(done.stdout)
    return times


def from_python(package: Path, code: Path) -> Times:
    """Times calls in this process."""
    eager, (x,) = spec().model, spec().example_inputs
    model = exportkit.load(package)
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(code), 1)  # type: ignore[attr-defined]  # not in its stubs
    with torch.no_grad():
        return in_turns(
            {
                "compiled code, torch's runner in Python": lambda: runner.run([x]),
                "Python": lambda: model(x),
                "the eager model": lambda: eager(x),
            },
            CALLS,
        )


def from_clients(folder: Path, package: Path) -> Times:
    """Times requests of clients that wait for each answer."""
    port, rpc_port = free_port(), free_port()
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "exportkit", "serve", str(package), "--port", str(port)]
    command += ["--grpc-port", str(rpc_port), "--no-access-log"]
    os.sched_setaffinity(0, {cores[-1]})
    with running(command, port, cores={cores[0]}, log=folder / "serve.log"):
        return in_turns(_requests(port, rpc_port), REQUESTS)


def _requests(port: int, rpc_port: int) -> dict[str, Callable[[], object]]:
    x = np.ones((2, 8), np.float32)
    http = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}")
    rpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{rpc_port}")
    given = tritonclient.http.InferInput("input", x.shape, "FP32")
    given.set_data_from_numpy(x)
    sent = tritonclient.grpc.InferInput("input", x.shape, "FP32")
    sent.set_data_from_numpy(x)
    return {
        "HTTP, tritonclient": lambda: http.infer("small", [given]),
        "gRPC, tritonclient": lambda: rpc.infer("small", [sent]),
    }


def table(times: Times) -> str:
    """Returns a Markdown table."""
    lines = ["| a call by | us, median | fastest |", "| --- | ---: | ---: |"]
    for name, each in times.items():
        lines.append(f"| {name} | {statistics.median(each):.1f} | {min(each):.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "small_calls")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = msgspec.to_builtins(describe(torch.device("cpu")))  # before this process is bound to a core
    package, code = make(options.folder)
    times = from_cpp(options.folder, package, code) | from_python(package, code)
    times |= from_clients(options.folder, package)
    print(table(times))
    if options.output:
        rounded = {name: [round(number, 2) for number in each] for name, each in times.items()}
        options.output.write_text(json.dumps({"machine": machine, "microseconds": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
