"""Sequences, and the methods of a package, as tritonclient asks for them over HTTP and gRPC."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import exportkit
from tests.runtime import stateful
from tests.serve.operations.server_processes import Launcher, ServerProcess
from tests.serve.operations.test_server_process import SEQUENCES
from tests.serve.protocol.messages import triton_inputs

both = pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])
SCALE = np.ones((2, 1), np.float32)
ONE, OTHER = ("one-of-the-clients-keys", "the-other-client-has-this")
STEPS = 6
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def server(
    launcher: Launcher, recorder_package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It has two keys, and takes 40 sequences."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{ONE}\n{OTHER}\n")
    keys.chmod(0o600)
    process = launcher.start(recorder_package, "--api-keys", keys, "--max-sequences", 40, "--sequence-finish", 0)
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="module")
def expected(recorder_package: Path) -> dict[int, list[Array]]:
    """What sessions answer to the steps of sequences, by their seeds."""
    found = {}
    with exportkit.load(recorder_package) as model:
        for seed in range(32):
            with model.session(batch=2) as session:
                found[seed] = [session.push(torch.from_numpy(rows(seed, step))).numpy() for step in range(STEPS)]
    return found


def rows(seed: int, step: int) -> Array:
    return np.random.default_rng([seed, step]).random((2, stateful.WIDTH), np.float32)


def given(module: Any, seed: int, step: int) -> list[Any]:
    return triton_inputs(module, {"x": rows(seed, step)})


def which(sequence: int | str, step: int, last: int = STEPS - 1) -> dict[str, Any]:
    return {"sequence_id": sequence, "sequence_start": step == 0, "sequence_end": step == last}


def bearer(key: str = ONE) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def clients(server: ServerProcess) -> dict[Any, str]:
    return {
        tritonclient.http: "{}:{}".format(*server.address),
        tritonclient.grpc: server.started["grpc"],
    }


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


def test_a_server_that_drains_answers_sequences_to_their_end(launcher: Launcher, recorder_package: Path, expected):
    server = launcher.start(recorder_package, "--sequence-finish", 20, "--drain-timeout", 60).wait_until_ready()
    address = "{}:{}".format(*server.address)

    def ask(step: int, last: int, sequence: int = 5) -> Any:
        with tritonclient.http.InferenceServerClient(address) as client:  # its connections are closed after answers
            inputs = given(tritonclient.http, 5, step)
            return client.infer("recorder.push", inputs, **which(sequence, step, last)).as_numpy("0")

    np.testing.assert_array_equal(ask(0, 3), expected[5][0])
    server.signal(signal.SIGTERM)
    server.until(lambda: any(line.startswith("draining") for line in server.report))
    assert server.ask("/v2/health/ready")[0] == 503
    with pytest.raises(InferenceServerException, match="begins any more: the server drains"):
        ask(0, 3, sequence=6)
    for step in (1, 2, 3):
        np.testing.assert_array_equal(ask(step, 3), expected[5][step])
    assert server.wait() == 0


@both
def test_what_clients_left_open_does_not_hold_up_the_end(launcher: Launcher, recorder_package: Path, protocol: Any):
    server = launcher.start(recorder_package, "--sequence-finish", 0).wait_until_ready()
    client = protocol.InferenceServerClient(clients(server)[protocol])
    if protocol is tritonclient.grpc:
        client.start_stream(lambda result, error: None)
    client.infer("recorder.push", given(protocol, 0, 0), **which(7, 0))
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 20  # of the 30 seconds that accepted requests may take
    client.close()


# --- methods ----------------------------------------------------------------------------------------------------------


def ask(client: Any, module: Any, method: Any, name: str = "recorder", **more: Any) -> np.ndarray[Any, Any]:
    tensors = triton_inputs(module, {"scale": SCALE}) if method == "peek" else given(module, 0, 0)
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
def test_what_is_asked_of_a_package_is_said_of_all_its_methods(server: ServerProcess, protocol):
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        more = {"headers": bearer()} | ({"as_json": True} if protocol is tritonclient.grpc else {})
        assert client.is_model_ready("recorder", headers=bearer())
        metadata = client.get_model_metadata("recorder", **more)
        assert (metadata["name"], metadata["versions"]) == ("recorder", ["1"])
        config = client.get_model_config("recorder.push", **more)
        config = config.get("config", config)
        methods = json.loads(config["parameters"]["methods"]["string_value"])
        assert methods["peek"]["served_as"] == "recorder.peek"
        if protocol is tritonclient.http:
            assert metadata["methods"] == methods
        found = client.get_inference_statistics("recorder", **more)["model_stats"]
        assert [each["name"] for each in found] == ["recorder.embed", "recorder.peek", "recorder.push"]
        with pytest.raises(InferenceServerException, match="no default method"):
            client.get_model_config("recorder", **more)
