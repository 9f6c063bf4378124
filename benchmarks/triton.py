"""Packages behind Triton with exportkit's backend, behind `exportkit serve`, on Ray, and called without a server.

    python -m benchmarks.triton arr_coc.pt2 small.pt2 streams.pt2 -o results.json

Every server and the client share all cores. All servers run, and each round measures every way in turn: one request at
a time, then eight connections. The client is the same, over HTTP with binary tensors, and does as little as it can.
Triton is asked with inputs in shared memory, too. A model with state is asked over gRPC's streams, which Ray's server
does not have. A direct call gets the inputs' bytes, as servers do. The table has medians of the rounds: milliseconds of
one request, of which CPU of the server, and rows a second. `benchmarks/small_calls` makes small.pt2, and
tests/export/state_models.py:streams is streams.pt2; Triton is found as by `exportkit triton`, and Ray is left out where
it is not installed. `--model-threads` is for all ways.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch

from benchmarks.children import ROOT, SEARCH_PATH
from benchmarks.serve.load_client import Connection, closed_loop, closed_loop_of_processes
from benchmarks.serve.running import Server, free_port, running
from benchmarks.serve.workload import Workload, http_post, workload
from exportkit.bench.runs import describe
from exportkit.deployment.triton import triton_command, write_triton_models

CONNECTIONS = 8
_KEY_HEADER = "exportkit-key"
SIZES = {  # by the package's name
    "arr_coc": {"3.15 MB (512x512)": "batch=1,gh=32,gw=32", "0.6 MB (224x224)": "batch=1,gh=14,gw=14"},
    "small": {"32 bytes": "batch=1"},
    "streams": {"a step of a sequence": "streams=1"},
}
Round = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Way:
    """A server and the port of its gRPC."""

    server: Server
    grpc: int
    key: str = ""  # of what Triton lets not everybody do


@contextmanager
def shared(way: Way, asked: Workload) -> Iterator[bytes]:
    """Puts a request's inputs into memory that Triton shares, and gives the request."""
    memory = SharedMemory(create=True, size=asked.size)
    try:
        memory.buf[: asked.size] = b"".join(asked.arrays)
        register = {"key": f"/{memory.name}", "offset": 0, "byte_size": asked.size}
        path = f"/v2/systemsharedmemory/region/{memory.name}/register"
        body = json.dumps(register).encode()
        status, _ = Connection(way.server.port).request(http_post(path, body, {_KEY_HEADER: way.key}))
        if status != 200:
            raise RuntimeError(f"Triton does not share memory: {status}")
        yield asked.shared_request(memory.name)
    finally:
        memory.close()
        memory.unlink()


@contextmanager
def servers(package: Path, folder: Path, options: argparse.Namespace, *, stateful: bool) -> Iterator[dict[str, Way]]:
    """Runs the servers, each with so many calls at a time."""
    cores, environment = os.sched_getaffinity(0), {"OMP_NUM_THREADS": str(options.model_threads)}
    repository = Path(tempfile.mkdtemp(dir=folder))
    (model,) = write_triton_models(package, repository)
    with (model.folder / "config.pbtxt").open("a") as config:
        config.write(f"instance_group {{ kind: KIND_CPU count: {options.instances} }}\n")
    triton, served, ray = (free_port(), free_port()), (free_port(), free_port()), free_port()
    start = triton_command(repository, options=[f"--http-port={triton[0]}", f"--grpc-port={triton[1]}"])
    command = [sys.executable, "-m", "exportkit", "serve", str(package), "--runners", f"{options.instances}"]
    ports = ["--port", f"{served[0]}", "--grpc-port", f"{served[1]}", "--no-access-log"]
    commands = {
        "Triton": ([*start.arguments, "--allow-metrics=false"], start.environment, triton),
        "exportkit serve": ([*command, *ports], {}, served),
    }
    if not stateful and find_spec("ray"):
        haproxy = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        commands["exportkit serve --ray"] = ([*command, "--ray", "--port", f"{ray}"], haproxy, (ray, 0))
    with ExitStack() as stack:
        ways = {}
        for name, (arguments, more, (http, rpc)) in commands.items():
            log, variables = folder / f"{name}.log", {**environment, **more}
            server = stack.enter_context(running(arguments, http, cores=cores, log=log, environment=variables))
            keys = [each.rpartition("=")[2] for each in arguments if each.startswith("--http-restricted-api")]
            ways[name] = Way(server, rpc, *keys)
        yield ways


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


def streamed(way: Way, asked: Workload, sizes: str, seconds: float) -> dict[str, float]:
    """Measures the steps of one stream, then of eight at the same time."""

    def steps(streams: int) -> list[float]:
        command = [sys.executable, "-m", "benchmarks.stream_steps", str(way.grpc), str(asked.package), "--sizes", sizes]
        command += ["--streams", str(streams), "--seconds", str(seconds)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": SEARCH_PATH}, stdout=-1, check=True)
        return [each for stream in json.loads(done.stdout) for each in stream]

    cpu = way.server.cpu_seconds()
    one = steps(1)
    cpu = way.server.cpu_seconds() - cpu
    rate = len(steps(CONNECTIONS)) / seconds
    return {"ms": 1e3 * statistics.median(one), "CPU ms": 1e3 * cpu / len(one), "rows/s": rate}


def measure(package: Path, sizes: str, options: argparse.Namespace, folder: Path) -> list[Round]:
    """Returns every round."""
    asked, rounds, stateful = workload(package, sizes), [], package.stem == "streams"
    request = asked.infer_request(**({"sequence_id": 1, "sequence_start": True} if stateful else {}))
    with servers(package, folder, options, stateful=stateful) as found:
        for way in found.values():
            # A server listens before its models are loaded.
            while Connection(way.server.port).request(request)[0] in (404, 503):
                time.sleep(0.1)
            if not stateful:
                closed_loop(way.server.port, request, CONNECTIONS, 1.0)  # the first calls of a batch's sizes
        for _ in range(options.rounds):
            made = {"direct": direct(asked, sizes, options.model_threads)}
            for name, way in found.items():
                made[name] = (
                    streamed(way, asked, sizes, options.seconds)
                    if stateful
                    else served(way.server, request, options.seconds)
                )
            if not stateful:
                with shared(found["Triton"], asked) as in_memory:
                    made["Triton, shared memory"] = served(found["Triton"].server, in_memory, options.seconds)
            rounds.append(made)
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
