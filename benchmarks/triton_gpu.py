"""Packages on a GPU, called directly and through Triton with CUDA shared memory.

    python -m benchmarks.triton_gpu PORT MODEL=PACKAGE@SIZES[@SIZES] ... -o results.json

Triton listens on PORT already. MODEL is its name there; each of SIZES is such as batch=8,gh=28,gw=28. One
client, and 16 with a process each, send inputs that lie in GPU memory and get the outputs there. "direct" is the same
package, with CUDA graphs, in this process: a call that is waited for, the same where the GPU had nothing to do before,
as between the requests of one client, and calls that follow one another. Inputs rotate. A model with state has a
session or a sequence for each. Clients speak HTTP over a socket, so that they cost little. Rounds take turns; the
medians count. The one client waits for its answer in two ways: asleep, and asking the socket again and again, as the
direct caller does with the GPU.
"""

from __future__ import annotations

import argparse
import base64
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import exportkit
from benchmarks.children import ROOT
from exportkit.bench.steps import parse_sizes
from exportkit.runtime.graphs import empty_inputs
from exportkit.serve.engine.model_replica import arguments_of

_ROUNDS = 5
_SECONDS = 2.0
_CLIENTS = 16
_PAUSE = 0.0002  # seconds in which a GPU has nothing to do, as between the requests of one client
_DTYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}
_CLIENT = """
import itertools, json, socket, sys, time
port, seconds, polls, pairs = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "polls", json.load(sys.stdin)
firsts, bodies = [first.encode() for first, _ in pairs], itertools.cycle([body.encode() for _, body in pairs])
with socket.create_connection(("127.0.0.1", port)) as line:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    def received():
        while polls:
            try:
                return line.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
        return line.recv(65536)
    def ask(body):
        line.sendall(body)
        answer = received()
        head, _, rest = answer.partition(b"\\r\\n\\r\\n")
        assert head.startswith(b"HTTP/1.1 200"), answer
        size = int(head.lower().partition(b"content-length:")[2].split()[0])
        while len(rest) < size:
            rest += received()
    for first in firsts: ask(first)
    for _ in range(5): ask(next(bodies))
    times, end = [], time.time() + seconds
    while time.time() < end:
        begin = time.perf_counter()
        ask(next(bodies))
        times.append(time.perf_counter() - begin)
print(json.dumps(times))
"""


class Region:
    """A block of GPU memory that Triton may read and write."""

    def __init__(self, port: int, name: str, size: int) -> None:
        from cuda.bindings import runtime  # type: ignore[import-not-found] # comes with a CUDA build of torch

        self.name, self._runtime = name, runtime
        _, self._address = runtime.cudaMalloc(size)
        _, handle = runtime.cudaIpcGetMemHandle(self._address)
        raw = {"b64": base64.b64encode(bytes(handle.reserved)).decode()}
        _post(port, f"cudasharedmemory/region/{name}/register", {"raw_handle": raw, "device_id": 0, "byte_size": size})

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        self._copy(self._address + offset, tensor.data_ptr(), tensor.nbytes)

    def read(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(like)
        self._copy(found.data_ptr(), self._address + offset, found.nbytes)
        return found

    def _copy(self, to: int, source: int, size: int) -> None:
        torch.cuda.synchronize()
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._runtime.cudaMemcpy(to, source, size, kind)
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("models", nargs="+", metavar="MODEL=PACKAGE@SIZES")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for asked in options.models:
        name, _, rest = asked.partition("=")
        package, *sizes = rest.split("@")
        with exportkit.load(package, "cuda", cuda_graphs=True) as model:
            rows += [_measured(model, name, size, options.port) for size in sizes]
    options.output.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


def _measured(model: exportkit.Model, name: str, size: str, port: int) -> dict[str, Any]:
    call, sizes = model.manifest.call, parse_sizes(size, model.manifest.call)
    calls, bodies = [], []
    for client in range(_CLIENTS):
        drawn = empty_inputs(call, sizes, model.device)
        inputs = [each.normal_() if each.is_floating_point() else each.zero_() for each in drawn]
        args, kwargs = arguments_of(call)(inputs)
        callee = model.session(**sizes) if model.manifest.method(None).state else model
        calls.append(functools.partial(callee, *args, **kwargs))
        sequence = client + 1 if callee is not model else None
        bodies.append(_bodies(port, name, f"{name}-{size}-{client}", call, inputs, tree_leaves(calls[-1]()), sequence))
    rounds = []
    for _ in range(_ROUNDS):
        turns = itertools.cycle(calls)
        waited, rested = _waited(turns, 0), _waited(turns, _PAUSE)
        direct_rate = _calls_a_second(turns, max(20, int(_SECONDS / 2 / waited)))
        asleep, polling = (statistics.median(_clients(port, [bodies], polls=each)[0]) for each in (False, True))
        many = _clients(port, [[body] for body in bodies])
        rounds.append((waited, rested, asleep, polling, direct_rate, sum(map(len, many)) / _SECONDS))
    direct, rested, asleep, polling, direct_rate, triton_rate = map(statistics.median, zip(*rounds))
    batch = sizes[call.dimensions[0].name]
    row = {"model": name, "size": size, "direct_ms": 1e3 * direct, "direct_after_pause_ms": 1e3 * rested}
    row |= {"triton_ms": 1e3 * asleep, "triton_polled_ms": 1e3 * polling}
    row |= {"direct_rows": batch * direct_rate, "triton_rows": batch * triton_rate}
    print(json.dumps(row), flush=True)
    return row


def _bodies(
    port: int, name: str, region: str, call: Any, inputs: list[Any], outputs: list[Any], sequence: int | None
) -> tuple[str, str]:
    """Returns a request whose tensors lie in a region of its own, after its answer was compared: first and later ones.

    They differ for a step of a sequence.
    """
    region = "".join(each if each.isalnum() else "-" for each in region)
    places, at = [], 0
    for tensor in (*inputs, *outputs):
        places.append(at)
        at += -(-tensor.nbytes // 256) * 256
    memory = Region(port, region, max(at, 1 << 21))
    for tensor, place in zip(inputs, places):
        memory.write(place, tensor)

    def tensors(described: Any, found: list[torch.Tensor], offsets: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "name": info.name,
                "shape": list(tensor.shape) or [1],
                "datatype": _DTYPES[str(tensor.dtype).partition(".")[2]],
                "parameters": {
                    "shared_memory_region": region,
                    "shared_memory_offset": offset,
                    "shared_memory_byte_size": tensor.nbytes,
                },
            }
            for info, tensor, offset in zip(described, found, offsets)
        ]

    document: dict[str, Any] = {"inputs": tensors(call.inputs, inputs, places)}
    document["outputs"] = tensors(call.outputs, outputs, places[len(inputs) :])
    for output in document["outputs"]:
        del output["shape"], output["datatype"]
    first, later = document, document
    if sequence is not None:
        first, later = (
            document | {"parameters": {"sequence_id": sequence, "sequence_start": start}} for start in (True, False)
        )
    _post(port, f"models/{name}/infer", first)
    for wanted, place in zip(outputs, places[len(inputs) :]):
        torch.testing.assert_close(memory.read(place, wanted), wanted)
    return _request(name, first), _request(name, later)


def _request(name: str, document: dict[str, Any]) -> str:
    body = json.dumps(document)
    return f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def _waited(calls: Iterator[Callable[[], object]], pause: float) -> float:
    """Returns the seconds of a call that is waited for, after a pause."""
    times = []
    end = time.time() + _SECONDS / 2
    while time.time() < end:
        time.sleep(pause)
        begin = time.perf_counter()
        next(calls)()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[10:])


def _calls_a_second(calls: Iterator[Callable[[], object]], count: int) -> float:
    """Returns how many calls that follow one another end in a second."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        next(calls)()
    torch.cuda.synchronize()
    return count / (time.perf_counter() - begin)


def _clients(port: int, bodies: list[list[tuple[str, str]]], *, polls: bool = False) -> list[list[float]]:
    """Returns the seconds of each client's requests, whose bodies rotate."""
    command = [sys.executable, "-c", _CLIENT, str(port), str(_SECONDS), "polls" if polls else "sleeps"]
    running = []
    for each in bodies:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdin is not None
        process.stdin.write(json.dumps(each).encode())
        process.stdin.close()
        running.append(process)
    found = []
    for process in running:
        assert process.stdout is not None
        found.append(json.loads(process.stdout.read()))
        assert process.wait() == 0
    return found


def _post(port: int, path: str, document: Any) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/{path}", json.dumps(document).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


if __name__ == "__main__":
    main()
