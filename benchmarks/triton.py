"""Packages behind Triton with exportkit's backend, behind `exportkit serve`, and called without a server.

    python -m benchmarks.triton arr_coc.pt2 small.pt2 -o results.json

Every server and the client share all cores. Both servers run, and each round measures every way in turn: one request at
a time, then eight connections. The client is the same, over HTTP with binary tensors, and does as little as it can. A
direct call gets the inputs' bytes, as servers do. The table has medians of the rounds: milliseconds of one request, of
which CPU of the server, and rows a second. `benchmarks/small_calls` makes small.pt2; Triton is found as by
`exportkit triton`. `--model-threads` is for all ways.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.children import ROOT, SEARCH_PATH
from benchmarks.serve.load_client import Connection, closed_loop, closed_loop_of_processes
from benchmarks.serve.running import Server, free_port, running, serve_command
from benchmarks.serve.workload import Workload, workload
from exportkit.bench.machine import describe
from exportkit.deployment.triton import triton_command, write_triton_models

CONNECTIONS = 8
SIZES = {  # by the package's name
    "arr_coc": {"3.15 MB (512x512)": "batch=1,gh=32,gw=32", "0.6 MB (224x224)": "batch=1,gh=14,gw=14"},
    "small": {"32 bytes": "batch=1"},
}
Round = dict[str, dict[str, float]]


@contextmanager
def servers(package: Path, folder: Path, threads: int, instances: int) -> Iterator[dict[str, Server]]:
    """Runs both servers, each with so many calls at a time."""
    cores, environment = os.sched_getaffinity(0), {"OMP_NUM_THREADS": str(threads)}
    repository = Path(tempfile.mkdtemp(dir=folder))
    (model,) = write_triton_models(package, repository)
    with (model.folder / "config.pbtxt").open("a") as config:
        config.write(f"instance_group {{ kind: KIND_CPU count: {instances} }}\n")
    ports = [free_port() for _ in range(3)]
    start = triton_command(repository, options=[f"--http-port={ports[0]}", f"--grpc-port={ports[1]}"])
    triton = [*start.arguments, "--allow-metrics=false"]
    serve = serve_command(package, ports[2], "--runners", str(instances))
    with (
        running(
            triton, ports[0], cores=cores, log=folder / "triton.log", environment={**environment, **start.environment}
        ) as one,
        running(serve, ports[2], cores=cores, log=folder / "serve.log", environment=environment) as other,
    ):
        yield {"Triton": one, "exportkit serve": other}


def direct(asked: Workload, sizes: str, threads: int) -> dict[str, float]:
    """Calls the package in a process of its own, which has as many threads as cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, "-m", "benchmarks.serve.peers.called", str(asked.package), "--sizes", sizes]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    (seconds,) = json.loads(done.stdout).values()
    return {"ms": 1e3 * seconds, "rows/s": 1 / seconds}


def served(server: Server, request: bytes, seconds: float) -> dict[str, float]:
    """Sends one request at a time, then from eight connections."""
    cpu = server.cpu_seconds()
    one = closed_loop(server.port, request, 1, seconds)
    cpu = server.cpu_seconds() - cpu
    many = closed_loop_of_processes(server.port, request, CONNECTIONS, seconds, 2)
    if one.failed or many.failed or not one.seconds:
        raise RuntimeError(f"requests failed: {one.failed}, {many.failed}")
    return {"ms": 1e3 * one.percentile(0.5), "CPU ms": 1e3 * cpu / len(one.seconds), "rows/s": many.rate}


def measure(package: Path, sizes: str, options: argparse.Namespace, folder: Path) -> list[Round]:
    """Returns every round."""
    asked, rounds = workload(package, sizes), []
    request = asked.infer_request()
    with servers(package, folder, options.model_threads, options.instances) as found:
        for server in found.values():
            while (
                Connection(server.port).request(request)[0] == 503
            ):  # exportkit serve listens before models are loaded
                time.sleep(0.1)
            closed_loop(server.port, request, CONNECTIONS, 1.0)  # the first calls of a batch's sizes
        for _ in range(options.rounds):
            made = {name: served(server, request, options.seconds) for name, server in found.items()}
            rounds.append({"direct": direct(asked, sizes, options.model_threads), **made})
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="+", help=f"named {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--model-threads", type=int, default=1)
    parser.add_argument("--instances", type=int, default=1, help="calls that a server runs at a time")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results: dict[str, list[Round]] = {}
    print("| request | way | ms | CPU ms | rows/s, 8 connections |\n| --- | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        for package in options.packages:
            for name, sizes in SIZES[package.stem].items():
                results[name] = rounds = measure(package.resolve(), sizes, options, Path(folder))
                for way in rounds[0]:
                    values = [
                        statistics.median(r[way].get(key, float("nan")) for r in rounds)
                        for key in ("ms", "CPU ms", "rows/s")
                    ]
                    print(f"| {name} | {way} | {values[0]:.3g} | {values[1]:.3g} | {values[2]:.0f} |", flush=True)
    if options.output:
        import msgspec

        machine = msgspec.to_builtins(describe(torch.device("cpu")))
        document = {"machine": machine, "model_threads": options.model_threads, "instances": options.instances}
        document["rounds"] = results
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
