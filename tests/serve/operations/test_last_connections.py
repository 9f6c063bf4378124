"""Clients that get no common answer: the last ones of a server that ends, and those that speak no TLS."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import ssl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.operations.http_server import HttpServer
from tests.serve.operations.certificates import make_certificates

_REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _ends(_: Request) -> Response:
    return PlainTextResponse("it ends", 503, headers={"connection": "close"})


def _server(listener: socket.socket, tls: ssl.SSLContext | None = None) -> HttpServer:
    app = Starlette(routes=[Route("/", _ends)])
    given: Any = None if tls is None else SimpleNamespace(context=tls)
    server = HttpServer(app, ConnectionLimits(), lambda client, error: None, given)
    server.listen([listener])
    return server


def _clients(listener: socket.socket, count: int) -> list[socket.socket]:
    clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
    for client in clients:
        client.settimeout(10)
    return clients


def _status(client: socket.socket) -> int:
    answer = http.client.HTTPResponse(client)
    answer.begin()
    return answer.status


def test_connections_that_wait_to_be_accepted_are_answered() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        clients = _clients(listener, 20)
        for client in clients:
            client.sendall(_REQUEST)

        async def end() -> None:
            server = _server(listener)
            await server.finish()  # before the loop has accepted one

        asyncio.run(end())
        assert [_status(client) for client in clients] == [503] * 20


def test_an_open_connection_may_ask_until_the_moment_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asks, is_silent = _clients(listener, 2)
        threading.Timer(0.1, asks.sendall, [_REQUEST]).start()

        async def end() -> None:
            server = _server(listener)
            await server.finish()

        asyncio.run(end())
        assert _status(asks) == 503
        assert is_silent.recv(1) == b""


@pytest.mark.process
def test_plain_http_to_a_port_with_tls_is_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as listener:

        async def ask_twice() -> None:
            server = _server(listener, tls)
            for _ in range(2):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(_REQUEST)
                assert b"200" not in await reader.read()
                writer.close()
            await server.close()

        asyncio.run(ask_twice())
    assert [record.getMessage() for record in caplog.records if "plain HTTP" in record.getMessage()] == [
        "a client spoke plain HTTP to this port, which has TLS: its address begins with https://"
    ]
