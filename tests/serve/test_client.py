"""The client repeats what may be repeated, and nothing else."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exportkit.errors import UsageError
from exportkit.serve import client as client_module
from exportkit.serve.client import Client
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    DeadlineError,
    NotServedError,
    ServeError,
    UnauthorizedError,
)

Reply = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers each request with the next reply of the test, then with the sum of its inputs."""

    protocol_version = "HTTP/1.1"
    replies: list[Reply]
    requests: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        length = int(self.headers["Inference-Header-Content-Length"])
        request = json.loads(body[:length])
        self.arrays, offset = [], length
        for tensor in request["inputs"]:
            end = offset + tensor["parameters"]["binary_data_size"]
            dtype = {"FP32": "<f4", "INT64": "<i8", "FP16": "<f2", "BOOL": "?"}[tensor["datatype"]]
            self.arrays.append(np.frombuffer(body[offset:end], dtype).reshape(tensor["shape"]))
            offset = end
        assert offset == len(body)
        self.requests.append({**request, "path": self.path, "headers": dict(self.headers)})
        reply = self.replies.pop(0) if self.replies else right
        reply(self)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


def respond(status: int, content: bytes, **headers: str) -> Reply:
    def reply(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return reply


def right(handler: Handler) -> None:
    total = np.sum([array.sum() for array in handler.arrays]).astype("<f4").reshape(1)
    output = {"name": "sum", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    header = json.dumps({"outputs": [output]}).encode()
    respond(200, header + total.tobytes(), Inference_Header_Content_Length=str(len(header)))(handler)


def reset(handler: Handler) -> None:
    """The server dies before it answers."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def half(handler: Handler) -> None:
    """The server dies while it answers."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.wfile.flush()
    reset(handler)


def refused(status: int, message: str = "no", **headers: str) -> Reply:
    return respond(status, json.dumps({"error": message}).encode(), **headers)


@pytest.fixture
def server() -> Iterator[type[Handler]]:
    handler = type("Scripted", (Handler,), {"replies": [], "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        handler.url = f"http://127.0.0.1:{listening.server_address[1]}"
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        yield handler
        listening.shutdown()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of the client. They pass on its clock, and take no time."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(client_module, "time", clock)
    return waits


X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.mark.parametrize(
    "reply",
    [
        reset,
        half,
        refused(429),
        refused(503),
        respond(500, b"<html>Internal Server Error</html>"),  # HAProxy's, as Ray sets it up
        respond(502, b"Bad Gateway"),
        respond(500, b'"text"'),
    ],
)
def test_what_may_be_repeated_is_repeated(reply: Reply, server: Any, slept: list[float]):
    server.replies += [reply] * 3
    with Client(server.url) as client:
        assert client.infer("m", X)["sum"] == [15]
    assert len(server.requests) == 4
    assert len(slept) == 3
    assert all(0 < wait <= 2 for wait in slept)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refused(400, "bad shape"), BadRequestError),
        (refused(404, "no model"), NotServedError),
        (refused(401), UnauthorizedError),
        (refused(500, "the model failed"), BackendError),
        (refused(504, "late"), DeadlineError),
        (respond(404, b"not json"), NotServedError),
        (respond(302, b"", Location="/elsewhere"), ServeError),
        (respond(200, b"{}"), BackendError),
        (respond(200, b"not json"), BackendError),
    ],
)
def test_what_would_fail_again_is_not_repeated(reply: Reply, kind: type[Exception], server: Any, slept: list[float]):
    server.replies.append(reply)
    with Client(server.url) as client, pytest.raises(kind):
        client.infer("m", X)
    assert (len(server.requests), slept) == (1, [])


def test_the_server_s_wait_is_kept(server: Any, slept: list[float]):
    server.replies += [refused(429, Retry_After="7"), refused(503, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT")]
    with Client(server.url) as client:
        client.infer("m", X)
    assert slept[0] == 7
    assert slept[1] <= 2


def test_a_wait_beyond_the_deadline_ends_at_once_with_the_reason(server: Any, slept: list[float]):
    server.replies += [refused(429, "full of rows", Retry_After="7")] * 3
    with Client(server.url, deadline=10) as client, pytest.raises(DeadlineError, match=r"2 attempts.*full of rows"):
        client.infer("m", X)
    assert slept == [7]
    with Client(server.url) as client, pytest.raises(DeadlineError, match="within 5 s, in 1 attempts"):
        client.infer("m", X, deadline=5)


def test_nobody_listening_is_a_deadline_error(slept: list[float]):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", deadline=5) as client, pytest.raises(DeadlineError, match="refused"):
        client.infer("m", X)
    assert len(slept) > 3
    assert sum(slept) <= 5


def test_a_server_that_never_answers_does_not_hold_the_client(server: Any):
    server.replies.append(lambda handler: time.sleep(1))
    with Client(server.url, deadline=0.2) as client, pytest.raises(DeadlineError):
        client.infer("m", X)


def test_the_request_has_what_was_given(server: Any, slept: list[float]):
    inputs = {
        "a": np.ones((2, 2), np.float16).T,
        "b": np.array([1, 2], ">i8"),
        "c": np.zeros((0, 3), np.bool_),
        "d": np.float32(4),
    }
    server.replies.append(reset)
    slept.append(0.0)
    with Client(server.url, api_key="k", deadline=20) as client:
        assert client.infer("m", inputs, version="3", outputs=["sum"])["sum"] == [11]
    first, second = server.requests
    assert second["path"] == "/v2/models/m/versions/3/infer"
    assert second["headers"]["Authorization"] == "Bearer k"
    assert second["outputs"] == [{"name": "sum"}]
    assert [(i["name"], i["datatype"], i["shape"]) for i in second["inputs"]] == [
        ("a", "FP16", [2, 2]),
        ("b", "INT64", [2]),
        ("c", "BOOL", [0, 3]),
        ("d", "FP32", []),
    ]
    assert first["parameters"]["timeout"] == 20_000_000  # microseconds
    assert second["parameters"]["timeout"] == pytest.approx((20 - slept[-1]) * 1e6, abs=2)


def test_a_dtype_without_a_datatype_is_refused(server: Any):
    with Client(server.url) as client, pytest.raises(UsageError, match="'x' is complex64"):
        client.infer("m", {"x": np.zeros(1, np.complex64)})
    assert server.requests == []


def test_bfloat16_travels(server: Any, slept: list[float]):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = np.array([1.5, -2], ml_dtypes.bfloat16)
    output = {"name": "y", "datatype": "BF16", "shape": [2], "parameters": {"binary_data_size": 4}}
    header = json.dumps({"outputs": [output]}).encode()
    content = header + values.tobytes()
    server.replies.append(respond(200, content, Inference_Header_Content_Length=str(len(header))))
    with Client(server.url) as client:
        answer = client.infer("m", X)["y"]
    assert answer.dtype == values.dtype
    assert answer.tolist() == [1.5, -2]


def bomb(coding: str, window: int) -> Reply:
    """Answers with 256 MiB of zeros, compressed only when it is asked: every worker of pytest reads this module."""

    def reply(handler: Handler) -> None:
        compressor = zlib.compressobj(1, wbits=window)
        parts = [compressor.compress(bytes(1 << 20)) for _ in range(1 << 8)]
        respond(200, b"".join([*parts, compressor.flush()]), Content_Encoding=coding)(handler)

    return reply


def endless(handler: Handler) -> None:
    """Answers as long as somebody reads."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"%x\r\n%s\r\n" % (1 << 16, b" " * (1 << 16)))
    handler.close_connection = True


@pytest.mark.parametrize(
    "reply",
    [
        respond(200, bytes(2000)),
        respond(500, b" " * 2000),
        bomb("gzip", 31),
        bomb("deflate", 15),
        endless,
    ],
)
def test_an_answer_that_is_too_large_is_refused_before_it_is_read(reply: Reply, server: Any, slept: list[float]):
    server.replies.append(reply)
    with Client(server.url, max_answer_bytes=1000) as client:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(BackendError, match=r"(?s)more than 1000 bytes.*max_answer_bytes"):
            client.infer("m", X)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
        assert client.infer("m", X)["sum"] == [15]
    assert slept == []


def test_an_answer_that_was_compressed_is_read(server: Any):
    header = json.dumps({"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}).encode()
    server.replies.append(respond(200, gzip.compress(header), Content_Encoding="gzip"))
    with Client(server.url, max_answer_bytes=len(header)) as client:
        assert client.infer("m", X)["y"].tolist() == [1, 2]


def test_the_client_imports_no_torch():
    code = "import sys, exportkit.serve.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
