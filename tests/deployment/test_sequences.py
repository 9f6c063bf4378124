"""Three servers behind the proxy of deploy/kubernetes/sequences.yaml: steps reach the server that has their state."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import urllib3

import exportkit
from tests.deployment.stepping import LostError, Steps
from tests.deployment.test_deploy import documents
from tests.runtime import stateful
from tests.serve.operations.server_processes import Launcher, ServerProcess

ENVOY = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
STEPS = 6
COUNT = 60  # sequences: so many that each server gets some
Answers = dict[int, list[np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stateful.write(tmp_path_factory.mktemp("sequences") / "recorder.pt2")


@pytest.fixture(scope="module")
def servers(recorder: Path) -> Iterator[list[ServerProcess]]:
    launcher = Launcher(recorder.parent)
    options = ("--sequence-finish", 5, "--sequence-idle", 600)
    started = [launcher.start(recorder, *options) for _ in range(3)]
    yield [server.wait_until_ready() for server in started]
    launcher.close()


@pytest.fixture(scope="module")
def expected(recorder: Path) -> Answers:
    """What sessions answer to the steps of sequences, by their seeds."""
    found = {}
    with exportkit.load(recorder) as model:
        for seed in range(COUNT):
            with model.session(batch=1) as session:
                found[seed] = [session.push(torch.from_numpy(row(seed, step))).numpy() for step in range(STEPS)]
    return found


@pytest.fixture(scope="module")
def proxy(servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Envoy with the configuration of the file, and other addresses. Gives its ports."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    if ENVOY is None:
        pytest.skip("Envoy is not installed")
    found = {"http": free_port(), "grpc": free_port()}
    configuration = yaml.safe_load(envoys_file())
    resources = configuration["static_resources"]
    for listener in resources["listeners"]:
        listener["address"] = address(found[listener["name"]])
    places = {"http": [server.started["http"] for server in servers], "grpc": [s.started["grpc"] for s in servers]}
    for cluster in resources["clusters"]:
        ports = [int(place.rpartition(":")[2]) for place in places[cluster["name"]]]
        assert [set(each) for each in cluster["load_assignment"]["endpoints"]] == [{"lb_endpoints"}]
        endpoints = [{"endpoint": {"address": address(port)}} for port in ports]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    file = tmp_path_factory.mktemp("envoy") / "envoy.json"
    file.write_text(json.dumps(configuration))
    command = [ENVOY, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    with running(command, found["http"]):
        wait_for_health(found["http"], servers)
        yield found


def envoys_file() -> str:
    (configuration,) = (each for each in documents("kubernetes/sequences.yaml") if each["kind"] == "ConfigMap")
    return str(configuration["data"]["envoy.yaml"])


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """Runs a command until it listens on a port, and to the end of the block."""
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 30
        while not listens(port):
            assert process.poll() is None, command
            assert time.monotonic() < end, command
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def wait_for_health(port: int, servers: list[ServerProcess]) -> None:
    """Waits until the proxy sends first steps to every server."""
    end = time.monotonic() + 30
    while not all(began(server) for server in servers):
        assert time.monotonic() < end
        (steps,) = sequences_at(port, range(1)).values()
        steps.infer(row(0, 0), end=True)


def sequences_at(port: int, seeds: range) -> dict[int, Steps]:
    pool = urllib3.PoolManager()
    return {seed: Steps(f"http://127.0.0.1:{port}", "recorder.push", pool) for seed in seeds}


def began(server: ServerProcess) -> int:
    """How many sequences began there."""
    return sum(value(server, "exportkit_sequences_ended_total")) + lives(server)


def lives(server: ServerProcess) -> int:
    return sum(value(server, "exportkit_sequences{"))


def value(server: ServerProcess, name: str) -> list[int]:
    lines = server.ask("/metrics")[2].decode().splitlines()
    return [int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(name)]


def row(seed: int, step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, step]).random((1, stateful.WIDTH), np.float32)


def ask(sequences: dict[int, Steps], steps: range, expected: Answers) -> set[int]:
    """Sends steps of sequences in turns. Returns the seeds of those that were lost, and says why."""
    lost: dict[int, str] = {}
    for step in steps:
        for seed, sequence in sequences.items():
            try:
                answer = sequence.infer(row(seed, step), end=step == STEPS - 1)
            except LostError as error:
                lost[seed] = str(error)
            else:
                np.testing.assert_array_equal(answer, expected[seed][step])
    for message in lost.values():  # another server says it, or Envoy lost the step with the connection
        assert "another replica has or had it" in message or "nobody knows whether the step ran" in message
    return set(lost)


# --- tests, in this order: two of them end a server -------------------------------------------------------------------


def test_envoy_reads_the_file_as_it_is(proxy: dict[str, int], tmp_path: Path):
    (tmp_path / "envoy.yaml").write_text(envoys_file())
    command = [str(ENVOY), "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "deprecated" in done.stderr.lower()) == (0, False), done.stderr


def test_sequences_that_name_their_replica_stay_with_it(proxy: dict[str, int], servers, expected: Answers):
    sequences = sequences_at(proxy["http"], range(COUNT))
    assert ask(sequences, range(STEPS - 1), expected) == set()
    living = [lives(server) for server in servers]
    assert sum(living) == COUNT
    assert min(living) > 0
    assert ask(sequences, range(STEPS - 1, STEPS), expected) == set()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("header", [True, False], ids=["with the header", "without"])
def test_other_clients_have_to_send_the_header(proxy: dict[str, int], expected: Answers, protocol: str, header: bool):
    module: Any = pytest.importorskip(f"tritonclient.{protocol}", reason="tritonclient is not installed")
    refused = []
    with module.InferenceServerClient(f"127.0.0.1:{proxy[protocol]}") as client:
        for seed in range(20):
            name = f"{protocol} {header} {seed}"
            headers = {"x-session-id": name} if header else {}
            for step in range(3):
                which = begins_or_ends(name, step, 2)
                try:
                    answer = client.infer("recorder.push", given(module, seed, step), headers=headers, **which)
                except Exception as error:
                    refused.append(str(error))
                    break
                np.testing.assert_array_equal(answer.as_numpy("0"), expected[seed][step])
    assert bool(refused) != header
    assert all("recorder has no sequence" in message for message in refused)


def test_a_stream_stays_with_its_server(proxy: dict[str, int], expected: Answers):
    module: Any = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    answers: queue.Queue[Any] = queue.Queue()
    with module.InferenceServerClient(f"127.0.0.1:{proxy['grpc']}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        turns = [(seed, step) for step in range(3) for seed in range(8)]
        for seed, step in turns:
            which = begins_or_ends(100 + seed, step, 2)
            client.async_stream_infer("recorder.push", given(module, seed, step), request_id=f"{seed} {step}", **which)
        for _ in turns:
            result, error = answers.get(timeout=60)
            assert error is None
            seed, step = map(int, result.get_response().id.split())
            np.testing.assert_array_equal(result.as_numpy("0"), expected[seed][step])
        client.stop_stream()


def given(module: Any, seed: int, step: int) -> list[Any]:
    x = module.InferInput("x", [1, stateful.WIDTH], "FP32")
    x.set_data_from_numpy(row(seed, step))
    return [x]


def begins_or_ends(sequence: int | str, step: int, last: int) -> dict[str, Any]:
    return {"sequence_id": sequence, "sequence_start": step == 0, "sequence_end": step == last}


def test_a_killed_server_loses_its_sequences_and_no_others(proxy: dict[str, int], servers, expected: Answers):
    before = lives(servers[0])
    sequences = sequences_at(proxy["http"], range(COUNT))
    ask(sequences, range(2), expected)
    there = lives(servers[0]) - before
    servers[0].signal(signal.SIGKILL)
    lost = ask(sequences, range(2, 3), expected)
    assert len(lost) == there > 0
    for seed in lost:
        del sequences[seed]
    assert ask(sequences, range(3, STEPS), expected) == set()


def test_sequences_end_at_a_server_that_drains(proxy: dict[str, int], servers, expected: Answers):
    sequences = sequences_at(proxy["http"], range(COUNT // 2))
    ask(sequences, range(2), expected)
    assert lives(servers[1]) > 0
    servers[1].signal(signal.SIGTERM)
    servers[1].until(lambda: "draining" in servers[1].errors)
    more = sequences_at(proxy["http"], range(COUNT // 2, COUNT))
    ask(more, range(1), expected)
    assert ask(sequences, range(2, STEPS), expected) == set()
    assert servers[1].wait() == 0
    assert ask(more, range(1, STEPS), expected) == set()
