"""Receivers as processes: they share the connections, die without harm to others, and end with their server."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.operations.asking_tiny import INFER, arrays, body, expected, mean
from tests.serve.operations.server_processes import Launcher, ServerProcess

NUMBER = 2


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("servers"), ("--receivers", str(NUMBER), "--no-grpc"))
    yield launcher
    launcher.close()


@pytest.fixture
def server(launcher: Launcher, tiny_package: Path) -> Iterator[ServerProcess]:
    process = launcher.start(tiny_package).wait_until_ready()
    yield process
    assert process.stop() == 0


def maps(process: psutil.Process) -> str:
    return " ".join(each.path for each in process.memory_maps())


def receivers(server: ServerProcess) -> list[psutil.Process]:
    return [each for each in server.descendants() if "exportkit-bodies" in maps(each)]


def answered(connection: HTTPConnection) -> bool:
    connection.request("POST", INFER, body())
    response = connection.getresponse()
    return response.status == 200 and np.allclose(mean(response.read()), expected(arrays()), rtol=1e-5)


def requests_counted(server: ServerProcess) -> float:
    families = text_string_to_metric_families(server.ask("/metrics")[2].decode())
    return sum(sample.value for each in families if each.name == "exportkit_requests" for sample in each.samples)


def test_connections_are_shared_evenly(server: ServerProcess) -> None:
    connections = [server.connect() for _ in range(8)]
    assert all(map(answered, connections))
    pids = {each.pid for each in receivers(server)}
    port = server.address[1]
    having = Counter(
        each.pid
        for each in psutil.net_connections("tcp")
        if each.pid in pids and each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
    )
    assert sorted(having.values()) == [4, 4]
    for connection in connections:
        connection.close()


def test_a_receiver_has_no_torch(server: ServerProcess) -> None:
    found = receivers(server)
    assert len(found) == NUMBER
    assert not any("torch" in maps(each) for each in found)


def test_a_receiver_that_is_killed_is_replaced_and_others_do_not_notice(server: ServerProcess) -> None:
    connections = [server.connect() for _ in range(2)]
    assert all(map(answered, connections))
    counted = requests_counted(server)
    victim, other = receivers(server)
    victim.kill()
    server.until(lambda: "a receiver was killed by SIGKILL" in server.errors)
    outcomes = []
    for connection in connections:
        try:
            outcomes.append(answered(connection))
        except OSError:
            outcomes.append(False)
    assert sorted(outcomes) == [False, True]
    server.until(lambda: len(receivers(server)) == NUMBER)
    assert other in receivers(server)
    again = [server.connect() for _ in range(4)]
    assert all(map(answered, again))
    assert requests_counted(server) >= counted + 5
    assert any("and is replaced" in line for line in server.report)


def test_requests_wait_while_every_receiver_is_replaced(server: ServerProcess) -> None:
    for victim in receivers(server):
        victim.kill()
    server.until(lambda: server.errors.count("and is replaced") == NUMBER)
    assert answered(server.connect())


def test_a_receiver_that_cannot_be_replaced_says_why_and_is_tried_again(
    launcher: Launcher, tiny_package: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("a-key-for-the-clients\n")
    keys.chmod(0o600)
    server = launcher.start(tiny_package, "--api-keys", keys).wait_until_ready()
    keys.rename(tmp_path / "away.txt")
    receivers(server)[0].kill()
    server.until(lambda: "The next try is in" in server.errors)
    assert f"ERROR: a receiver cannot start: the file of API keys {keys} cannot be read" in server.errors
    assert "error: a receiver exited with status 2. What it wrote to stderr says why." in server.errors
    assert "Traceback" not in server.errors
    assert server.ask("/v2/health/live")[0] == 200  # by the other one
    (tmp_path / "away.txt").rename(keys)
    server.until(lambda: len(receivers(server)) == NUMBER)
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_for_the_server_alone(server: ServerProcess, number: int) -> None:
    """A service manager sends them to every process."""
    before = receivers(server)
    for each in before:
        each.send_signal(number)
    assert answered(server.connect())
    assert receivers(server) == before


def test_more_connections_than_may_be_are_refused(launcher: Launcher, tiny_package: Path) -> None:
    server = launcher.start(tiny_package, "--max-connections", "4").wait_until_ready()
    open_ones = [server.connect() for _ in range(4)]
    assert all(map(answered, open_ones))
    refused = server.connect()
    refused.request("GET", "/v2/health/live")
    response = refused.getresponse()
    assert response.status == 503
    assert "2 connections are open" in json.loads(response.read())["error"]
    for connection in open_ones:
        connection.close()
    server.until(lambda: server.ask("/v2/health/live")[0] == 200)
    assert server.stop() == 0


def test_addresses_that_cannot_be_had_are_an_error_that_says_what_to_do(launcher: Launcher, tiny_package: Path) -> None:
    server = launcher.start(
        tiny_package, before="import exportkit.serve.receiving.receivers as r; r.RESERVED_BYTES = 1 << 62"
    )
    assert server.wait() == 4
    assert "GiB of addresses for bodies cannot be had" in server.errors
    assert "--receivers 0 needs none" in server.errors


def test_a_receiver_that_cannot_start_ends_the_server(launcher: Launcher, tiny_package: Path) -> None:
    broken = "import exportkit.serve.receiving.receivers as r; r._MODULE = 'no.such.module'"
    server = launcher.start(tiny_package, before=broken)
    assert server.wait() == 4
    assert "a receiver exited with status 1" in server.errors


def test_large_bodies_and_answers_arrive_whole(server: ServerProcess) -> None:
    inputs = arrays(batch=4, gh=6)
    for headers in ({}, {"Accept-Encoding": "gzip"}):
        status, _, answer = server.ask(INFER, body(inputs), headers)
        assert status == 200
        if not headers:
            np.testing.assert_allclose(mean(answer), expected(inputs), rtol=1e-4, atol=1e-5)


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_no_room_taken(server: ServerProcess) -> None:
    with socket.create_connection(server.address) as connection:
        connection.sendall(
            f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode() + os.urandom(10)
        )
    assert answered(server.connect())
