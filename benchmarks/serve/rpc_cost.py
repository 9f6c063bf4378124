"""What gRPC costs beside a model: `python -m benchmarks.serve.rpc_cost`.

Prints the table of docs/adr/0030-grpc-without-stubs.md. Each server is a process, and gets the same request of 3 MB in
turn with the others: gRPC alone, which throws the message away; ours, with a model that does nothing; ours without
`keep_freed_memory`. Then a request of 40 MB, and how much memory it takes at its peak and while it waits (glibc maps
memory of this size, so that the process's size tells what is in use).
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import msgspec

from exportkit.serve.process_settings import keep_freed_memory
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InferTiming
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.rpc.message_classes import INFERENCE, message_class

BODY, LARGE = 3 << 20, 40 << 20
REQUESTS = 150
SERVERS = ("gRPC alone", "exportkit", "exportkit without keep_freed_memory")


class Nothing:
    """A repository of one model, which answers at once and without outputs."""

    name, version, max_body = "nothing", "1", LARGE

    def models(self) -> list[Any]:
        return [self]

    def model(self, *_: Any) -> Any:
        return self

    def admit(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    async def infer(self, request: InferRequest) -> InferAnswer:
        waiting = msgspec.structs.replace(self._answer, id=f"{_memory('VmRSS')}")
        return waiting if request.inputs[0].data.nbytes == LARGE else self._answer

    _answer = InferAnswer(name, version, "", (), InferTiming(0, 0, 0, 0, 1))


def _memory(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


async def _serve(kind: str) -> None:
    if kind == "gRPC alone":

        async def answer(message: bytes, context: Any) -> bytes:
            return b""

        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
        plain = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
        port = plain.add_insecure_port("127.0.0.1:0")
        await plain.start()
    else:
        if kind == "exportkit":
            keep_freed_memory()
        ours = GrpcServer(Nothing(), RpcOptions())
        port = ours.port
        await ours.start()
    print(port, flush=True)
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        print(time.process_time(), _memory("VmRSS"), _memory("VmHWM"), flush=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew


class Server:
    """Starts a server in a process, and reads its address and CPU time."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.serve.rpc_cost", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{int(self._process.stdout.readline())}")
        self.ask = self._channel.unary_unary(f"/{INFERENCE}/ModelInfer")

    def status(self) -> tuple[float, int, int]:
        """Returns seconds of CPU, bytes in memory, and their maximum since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, now, peak = self._process.stdout.readline().split()
        return float(seconds), int(now), int(peak)

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _request(size: int) -> bytes:
    message = message_class("inference.ModelInferRequest")(model_name="nothing", raw_input_contents=[os.urandom(size)])
    message.inputs.add(name="x", datatype="UINT8", shape=[size])
    return bytes(message.SerializeToString())


def main() -> None:
    servers = {kind: Server(kind) for kind in SERVERS}
    request = _request(BODY)
    for _ in range(10):
        for server in servers.values():
            server.ask(request)
    began = {kind: server.status()[0] for kind, server in servers.items()}
    times: dict[str, list[float]] = {kind: [] for kind in SERVERS}
    for _ in range(REQUESTS):
        for kind, server in servers.items():
            start = time.perf_counter()
            server.ask(request)
            times[kind].append(time.perf_counter() - start)
    print("| one request of 3 MB at a time | ms, median | ms of the server's CPU |\n| --- | --: | --: |")
    for kind, server in servers.items():
        cpu = (server.status()[0] - began[kind]) / REQUESTS
        print(f"| {kind} | {statistics.median(times[kind]) * 1e3:.2f} | {cpu * 1e3:.2f} |")
    for server in servers.values():
        server.close()
    measured = [_memory_of_a_request() for _ in range(3)]
    peak, waiting = (max(each) / LARGE for each in zip(*measured))
    print(f"\n40 MB: {peak:.1f} bodies at the peak, {waiting:.1f} while the model runs.")


def _memory_of_a_request() -> tuple[int, int]:
    """Returns the bytes that a new server's first large request takes at its peak, and while the model runs."""
    server = Server("exportkit")
    server.ask(_request(BODY))
    before = server.status()[1]
    answer = message_class("inference.ModelInferResponse").FromString(server.ask(_request(LARGE)))
    peak = server.status()[2]
    server.close()
    return peak - before, int(answer.id) - before


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_serve(sys.argv[1]))
    else:
        main()
