"""Sequences, and the methods of a package, as tritonclient asks for them over HTTP and gRPC."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.runtime import stateful
from tests.serve.operations import sequence_server
from tests.serve.operations.sequence_server import ONE, OTHER, STEPS, bearer, clients, given, inputs, rows, which
from tests.serve.operations.server_processes import Launcher, ServerProcess
from tests.serve.operations.test_server_process import SEQUENCES

recorder, server, expected = sequence_server.recorder, sequence_server.server, sequence_server.expected  # fixtures
both = pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])
SCALE = np.ones((2, 1), np.float32)


@both
@pytest.mark.parametrize("sequence", [7, "seven"])
def test_interleaved_sequences_of_two_keys_equal_sessions(server: ServerProcess, expected, protocol, sequence):
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        for step in range(STEPS):
            for seed, key in enumerate((ONE, OTHER)):  # the same id, and not the same sequence
                answer = client.infer(
                    "recorder.push", given(protocol, seed, step), headers=bearer(key), **which(sequence, step)
                )
                np.testing.assert_array_equal(answer.as_numpy("0"), expected[seed][step])
        with pytest.raises(InferenceServerException, match="its last step was answered") as ended:
            client.infer("recorder.push", given(protocol, 0, 1), headers=bearer(), sequence_id=sequence)
        assert ended.value.status() in ("409", "StatusCode.FAILED_PRECONDITION")


def test_limits_metrics_and_the_log_name_sequences(server: ServerProcess):
    with tritonclient.http.InferenceServerClient("{}:{}".format(*server.address)) as client:

        def ask(sequence: int, step: int) -> None:
            inputs = given(tritonclient.http, 0, step)
            client.infer("recorder.push", inputs, headers=bearer(), **which(sequence, step, last=1))

        for sequence in range(1, 41):
            ask(sequence, 0)
        with pytest.raises(InferenceServerException, match="there are 40 sequences, and at most 40 may be") as full:
            ask(41, 0)
        assert full.value.status() == "429"
        _, _, content = server.ask("/metrics", headers=bearer())
        metrics = dict(line.rsplit(" ", 1) for line in content.decode().splitlines() if not line.startswith("#"))
        assert metrics['exportkit_sequences{model="recorder"}'] == "40.0"
        assert float(metrics['exportkit_sequence_state_bytes{model="recorder"}']) > 40 * 8
        for sequence in range(1, 41):
            ask(sequence, 1)
    _, _, content = server.ask("/metrics", headers=bearer())
    assert 'exportkit_sequences{model="recorder"} 0.0' in content.decode()
    assert 'exportkit_sequences_ended_total{model="recorder",reason="end"}' in content.decode()
    assert all(f"\nexportkit_{name}{{" in content.decode() for name in SEQUENCES)
    server.until(lambda: [line for line in server.access_log if line.get("sequence") == 41 and line["status"] == 429])


def test_a_server_that_drains_answers_sequences_to_their_end(launcher: Launcher, recorder: Path, expected):
    server = launcher.start(recorder, "--sequence-finish", 20, "--drain-timeout", 60).wait_until_ready()
    address = "{}:{}".format(*server.address)

    def ask(step: int, last: int) -> Any:
        with tritonclient.http.InferenceServerClient(address) as client:  # its connections are closed after answers
            inputs = given(tritonclient.http, 5, step)
            return client.infer("recorder.push", inputs, **which(5, step, last)).as_numpy("0")

    np.testing.assert_array_equal(ask(0, 3), expected[5][0])
    server.signal(signal.SIGTERM)
    server.until(lambda: any(line.startswith("draining") for line in server.report))
    for step in (1, 2, 3):
        np.testing.assert_array_equal(ask(step, 3), expected[5][step])
    assert server.wait() == 0


@both
def test_what_clients_left_open_does_not_hold_up_the_end(launcher: Launcher, recorder: Path, protocol: Any):
    server = launcher.start(recorder, "--sequence-finish", 0).wait_until_ready()
    client = protocol.InferenceServerClient(clients(server)[protocol])
    if protocol is tritonclient.grpc:
        client.start_stream(lambda result, error: None)
    client.infer("recorder.push", given(protocol, 0, 0), **which(7, 0))
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 20  # of the 30 seconds that accepted requests may take
    client.close()


def test_without_sequences_state_is_left_out(launcher: Launcher, recorder: Path):
    server = launcher.start(recorder, "--max-sequences", 0).wait_until_ready()
    assert [model["name"] for model in server.started["models"]] == ["recorder.embed"]
    body = json.dumps({"inputs": []}).encode()
    status, _, answer = server.ask("/v2/models/recorder.push/infer", body)
    assert (status, b"has state" in answer) == (404, True)
    assert server.stop() == 0


# --- methods ----------------------------------------------------------------------------------------------------------


def ask(client: Any, module: Any, method: Any, name: str = "recorder", **more: Any) -> np.ndarray[Any, Any]:
    tensors = inputs(module, scale=SCALE) if method == "peek" else given(module, 0, 0)
    parameters = {} if method is None else {"method": method}
    return client.infer(name, tensors, headers=bearer(), parameters=parameters, **more).as_numpy("0")


@both
def test_the_parameter_names_the_method(server: ServerProcess, expected, protocol):
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        np.testing.assert_allclose(ask(client, protocol, "embed"), 2 * np.tanh(rows(0, 0)), rtol=1e-6)
        np.testing.assert_array_equal(ask(client, protocol, "push", **which("m", 0, 1)), expected[0][0])
        peeked = ask(client, protocol, "peek", **which("m", 1, 1))
        np.testing.assert_allclose(peeked, rows(0, 0) / stateful.ROWS, rtol=1e-6)
        assert ask(client, protocol, "embed", "recorder.embed").shape == (2, stateful.WIDTH)


@both
@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("recorder", None, "recorder has no default method that is served"),
        ("recorder", "none", "the method `none` of recorder is not served"),
        ("recorder", "fill", "the method `fill` of recorder is not served: it writes into its input out"),
        ("recorder.embed", "push", "the request is for recorder.embed, and its parameter `method` says `push`"),
    ],
)
def test_what_names_no_method_is_refused(server: ServerProcess, protocol, name, method, words):
    client = protocol.InferenceServerClient(clients(server)[protocol])
    with client, pytest.raises(InferenceServerException, match=re.escape(words)):
        ask(client, protocol, method, name)


@both
def test_what_is_asked_of_a_package_is_said_of_all_its_methods(server: ServerProcess, protocol):
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        more = {"headers": bearer()} | ({"as_json": True} if protocol is tritonclient.grpc else {})
        assert client.is_model_ready("recorder", headers=bearer())
        metadata = client.get_model_metadata("recorder", **more)
        assert (metadata["name"], metadata["versions"]) == ("recorder", ["1"])
        config = client.get_model_config("recorder.push", **more)
        config = config.get("config", config)
        methods = json.loads(config["parameters"]["methods"]["string_value"])
        assert methods["push"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, stateful.WIDTH]}]
        assert methods["peek"]["served_as"] == "recorder.peek"
        if protocol is tritonclient.http:
            assert metadata["methods"] == methods
        found = client.get_inference_statistics("recorder", **more)["model_stats"]
        assert [each["name"] for each in found] == ["recorder.embed", "recorder.peek", "recorder.push"]
        with pytest.raises(InferenceServerException, match="no default method"):
            client.get_model_config("recorder", **more)
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="loaded and unloaded as a whole"):
                change("recorder.push", headers=bearer())
