"""Over real connections: answers reach clients that were refused, those that vanish are noticed, memory stays small."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.operations.observation import Observation
from tests.runtime.isolation import eventually
from tests.serve.echo_models import EchoRepository, repository
from tests.serve.http.asking import infer_body
from tests.serve.memory import traced_memory
from tests.serve.page.in_thread import Site, served

INFER = "POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def connected(site: Site) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as connection:
        yield connection


def head(**headers: object) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    return (INFER + "".join(lines) + "\r\n").encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Reads one answer that says how long it is."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(65536)
        assert received, data
        data += received
    top, _, body = data.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(status.split()[1]), headers, body


@pytest.fixture(scope="module")
def ours() -> Iterator[tuple[Site, EchoRepository]]:
    """A server whose models the test may change."""
    models = repository()
    with served(make_app(models, HttpOptions())) as site:
        yield site, models


def test_a_refused_body_is_thrown_away_and_the_connection_goes_on(site: Site) -> None:
    """The client reads only when it has sent all. A connection that were closed would take the answer with it."""
    with connected(site) as connection:
        for _ in range(2):
            connection.sendall(head(Content_Length=200 << 20, Inference_Header_Content_Length=100))
            for _ in range(200):
                connection.sendall(bytes(1 << 20))
            assert answer(connection)[0] == 413


def test_a_client_that_sends_on_gets_its_refusal_though_the_server_drains() -> None:
    app = Observation([]).wrap(make_app(repository(), HttpOptions()), lambda: True)
    with served(app) as site, connected(site) as connection:
        connection.sendall(head(Content_Length=50 << 20, Inference_Header_Content_Length=100))
        for _ in range(50):
            connection.sendall(bytes(1 << 20))
        status, headers, _ = answer(connection)
        assert (status, headers["connection"]) == (413, "close")
        assert connection.recv(1) == b""


def test_a_client_that_asks_first_need_not_send(site: Site) -> None:
    with connected(site) as connection:
        connection.sendall(head(Content_Length=200 << 20, Inference_Header_Content_Length=100, Expect="100-continue"))
        status, headers, _ = answer(connection)
        assert (status, headers["connection"]) == (413, "close")


def test_headers_without_an_end_are_refused(site: Site) -> None:
    """So are requests without an end, whose client reads no answer."""
    first = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"

    def send(connection: socket.socket, part: bytes) -> None:
        connection.sendall(first)
        for _ in range(100):
            connection.sendall(part)
            time.sleep(0.01)

    for part in (b"x: y\r\n" * 4000, b"x: " + b"y" * 60_000, (b"\r\n" + first) * 2000):
        with connected(site) as connection, pytest.raises(ConnectionError):
            send(connection, part)
    with connected(site) as connection:  # a long body is none
        body, length = infer_body(("x", "FP32", [1 << 20], bytes(4 << 20)))
        connection.sendall(head(Content_Length=len(body), **length) + body)
        assert answer(connection)[0] == 200


def test_a_body_before_another_protocol_is_refused(site: Site) -> None:
    """The parser would take it for the other protocol. Java's client offers HTTP/2 with its first request."""
    body, length = infer_body(("x", "FP32", [2], bytes(8)))
    with connected(site) as connection:
        connection.sendall(head(Content_Length=len(body), Connection="Upgrade", Upgrade="h2c", **length) + body)
        status, headers, text = answer(connection)
        assert (status, headers["connection"], b"version(HTTP_1_1)" in text) == (400, "close", True)
    offers = {"Connection": "Upgrade", "Upgrade": "h2c"}
    assert site.get("/v2/health/live", offers).status == 200


def test_what_is_no_http_gets_an_error_as_everything_does(site: Site) -> None:
    for bad in (b"\x16\x03\x01\x02\r\n\r\n", head(Content_Length=2, Transfer_Encoding="chunked")):
        with connected(site) as connection:
            connection.sendall(bad)
            status, headers, text = answer(connection)
            assert (status, headers["content-type"], list(json.loads(text))) == (400, "application/json", ["error"])


def test_a_trailer_is_no_header(site: Site) -> None:
    """A proxy that checks headers may pass trailers on."""
    body, length = infer_body(("x", "FP32", [2], bytes(8)))
    with connected(site) as connection:
        top = head(Transfer_Encoding="chunked", **length)
        trailers = b"X-Request-Id: of-a-trailer\r\nContent-Encoding: gzip\r\n"
        connection.sendall(b"%s%x\r\n%s\r\n0\r\n%s\r\n" % (top, len(body), body, trailers))
        status, headers, _ = answer(connection)
        assert (status, headers["x-request-id"] == "of-a-trailer") == (200, False)
        connection.sendall(head(Content_Length=len(body), X_Request_Id="of-a-header", **length) + body)
        assert answer(connection)[1]["x-request-id"] == "of-a-header"


@pytest.mark.parametrize(
    "name", ["Host", "Authorization", "Origin", "Content-Encoding", "Inference-Header-Content-Length"]
)
def test_a_header_that_decides_comes_once(site: Site, name: str) -> None:
    """Of two, a proxy may have checked the other."""
    with connected(site) as connection:
        connection.sendall(head()[:-2] + f"{name}: 0\r\n{name}: localhost\r\n\r\n".encode())
        status, _, text = answer(connection)
        assert (status, b"times" in text) == (400, True)


def test_clients_that_vanish_leave_the_queue(ours: tuple[Site, EchoRepository]) -> None:
    site, models = ours
    model = models.model("echo")
    body, length = infer_body(("x", "FP32", [2], bytes(8)))
    model.hold()
    ways = (lambda c: c.close(), lambda c: c.shutdown(socket.SHUT_RDWR), reset)
    for vanish, requests in itertools.product(ways, (1, 3)):
        cancelled = model.cancelled
        with connected(site) as connection:
            connection.sendall((head(Content_Length=len(body), **length) + body) * requests)
            assert eventually(lambda: model.running == 1)
            vanish(connection)
            assert eventually(lambda: model.cancelled == cancelled + 1)  # noqa: B023  (it is called at once)
    with connected(site) as connection:  # in the middle of a body
        connection.sendall(head(Content_Length=len(body), **length) + body[:-1])
        assert eventually(lambda: model.held == len(body))
    assert eventually(lambda: model.held == 0)
    with connected(site) as connection:  # what stays is answered
        connection.sendall(head(Content_Length=len(body), **length) + body)
        assert eventually(lambda: model.running == 1)
        model.release()
        assert answer(connection)[0] == 200


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def test_a_request_needs_little_more_memory_than_its_body(site: Site) -> None:
    """30 MB are received into the memory that the model reads, and sent from the memory that it wrote."""
    size = 30 << 20
    text, length = infer_body(("x", "FP32", [size // 4], b""))
    text = text.replace(b'"binary_data_size": 0', b'"binary_data_size": %d' % size)
    length["inference-header-content-length"] = str(len(text))
    block, blank = bytes(1 << 16), bytearray(1 << 16)
    with connected(site) as connection, traced_memory() as memory:
        connection.sendall(head(Content_Length=len(text) + size, **length) + text)
        for _ in range(size // len(block)):
            connection.sendall(block)
        received = 0
        while received < size:
            received += connection.recv_into(blank)
    assert size <= memory.peak < 1.2 * size
