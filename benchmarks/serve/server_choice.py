"""What an HTTP server costs for a body of 3 MB; docs/adr/0027-http-server.md follows from it.

`python benchmarks/serve/server_choice.py` starts each server on the first core and loads it from the second, with one
connection and with eight. Each server reads the body and answers 16 bytes. CPU time is of the server's processes.
It needs uvicorn, httptools, starlette, granian, aiohttp, grpcio and psutil; `--servers` chooses some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tools.generated import in_lines

BODY = 3 * 1024 * 1024
ANSWER = b"x" * 16
SERVERS = ("uvicorn", "starlette", "granian", "aiohttp", "grpc.aio")


# --- the servers ------------------------------------------------------------------------------------------------------


async def plain(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Writes the body into one buffer, as `exportkit serve` does."""
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    length = int(dict(scope["headers"])[b"content-length"])
    body, filled = bytearray(length), 0
    while True:
        message = await receive()
        chunk = message.get("body", b"")
        body[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
        if not message.get("more_body"):
            break
    await _answer(send)


async def _answer(send: Callable[[Any], Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"16")]})
    await send({"type": "http.response.body", "body": ANSWER})


def _starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def infer(request: Request) -> Response:
        assert len(await request.body()) == BODY
        return Response(ANSWER)

    return Starlette(routes=[Route("/", infer, methods=["POST"])])


def _serve(kind: str, port: int) -> None:
    if kind in ("uvicorn", "starlette"):
        import uvicorn

        app = plain if kind == "uvicorn" else _starlette()
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False, http="httptools")
    elif kind == "granian":
        from granian import Granian
        from granian.constants import Interfaces

        Granian(
            f"{Path(__file__).stem}:plain",
            port=port,
            interface=Interfaces.ASGI,
            workers=1,
            log_enabled=False,
            working_dir=Path(__file__).parent,
        ).serve()
    elif kind == "aiohttp":
        from aiohttp import web

        async def infer(request: web.Request) -> web.Response:
            assert len(await request.read()) == BODY
            return web.Response(body=ANSWER)

        app = web.Application(client_max_size=2 * BODY)
        app.router.add_post("/", infer)
        web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)
    else:
        asyncio.run(_serve_grpc(port))


async def _serve_grpc(port: int) -> None:
    import grpc

    async def infer(request: bytes, context: Any) -> bytes:
        assert len(request) == BODY
        return ANSWER

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2 * BODY)])
    handler = grpc.unary_unary_rpc_method_handler(infer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Infer": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


# --- the client -------------------------------------------------------------------------------------------------------


class HttpClient:
    """One connection that is kept open. It does as little as a client can."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY}\r\n\r\n".encode()
        self._body = bytes(BODY)

    def request(self) -> None:
        self._socket.sendall(self._head)
        self._socket.sendall(self._body)
        answer = b""
        while not answer.endswith(ANSWER):
            part = self._socket.recv(65536)
            assert part, answer
            answer += part
        assert b" 200 " in answer[:20], answer


class GrpcClient:
    """One channel."""

    def __init__(self, port: int) -> None:
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1)]
        self._call = grpc.insecure_channel(f"127.0.0.1:{port}", options=options).unary_unary("/bench/Infer")
        self._body = bytes(BODY)

    def request(self) -> None:
        assert self._call(self._body, wait_for_ready=True) == ANSWER


def _cpu_seconds(server: psutil.Process) -> float:
    processes = [server, *server.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _load(client: type[HttpClient | GrpcClient], port: int, connections: int, requests: int) -> list[float]:
    """Returns the seconds of each request."""
    clients, seconds = [client(port) for _ in range(connections)], []

    def work(one: HttpClient | GrpcClient) -> None:
        for _ in range(requests // connections):
            start = time.perf_counter()
            one.request()
            seconds.append(time.perf_counter() - start)

    threads = [threading.Thread(target=work, args=(one,)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def _measure(kind: str, connections: int, requests: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", kind, "--port", str(port)]
    server = psutil.Process(subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {0})).pid)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        client = GrpcClient if kind == "grpc.aio" else HttpClient
        _load(client, port, connections, max(requests // 5, connections))
        before, start = _cpu_seconds(server), time.perf_counter()
        seconds = sorted(_load(client, port, connections, requests))
        elapsed, used = time.perf_counter() - start, _cpu_seconds(server) - before
    finally:
        for process in [*server.children(recursive=True), server]:
            process.kill()
    return {
        "server": kind,
        "connections": connections,
        "cpu_ms": 1e3 * used / len(seconds),
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * seconds[int(len(seconds) * 0.99)],
        "requests_per_second": len(seconds) / elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=SERVERS)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3, help="the servers take turns; the best round is given")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve, options.port)
        return
    os.sched_setaffinity(0, {1})
    rows = []
    for connections in (1, 8):
        rounds = [
            [_measure(kind, connections, options.requests) for kind in options.servers] for _ in range(options.rounds)
        ]
        for of_one_server in zip(*rounds):
            row = min(of_one_server, key=lambda found: float(found["cpu_ms"]))
            rows.append(row)
            print({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
    if options.output:
        options.output.write_text(f"{in_lines(rows)}\n")


if __name__ == "__main__":
    main()
