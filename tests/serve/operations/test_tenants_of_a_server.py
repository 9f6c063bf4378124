"""Limits of API keys in a server: who is refused, with what, and what others notice."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from tests.runtime import stateful
from tests.serve.operations import asking_tiny, sequence_server
from tests.serve.operations.sequence_server import bearer, clients, given, inputs, rows, which
from tests.serve.operations.server_processes import Launcher, ServerProcess

recorder = sequence_server.recorder  # a fixture
both = pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])

FREE, EMBED, ONE_ROW, ONCE, TWICE, SLOW = (
    f"the-key-of-the-client-{name}" for name in ("free", "embed", "rows", "once", "twice", "slow")
)
_KEYS = f"""
{FREE}
{EMBED} label=embed models=recorder.embed
{ONE_ROW} label=rows rows=0.01 burst=100
{ONCE} label=once requests=0.01 burst=100
{TWICE} label=once requests=0.01 burst=100
{SLOW} label=slow in-flight=1
"""
EMBEDDING = "/v2/models/recorder.embed/infer"


def written(path: Path) -> Path:
    path.write_text(_KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return written(tmp_path / "keys.txt")


@pytest.fixture
def server(launcher: Launcher, recorder: Path, tiny_package: Path, keys: Path) -> Iterator[ServerProcess]:
    process = launcher.start(recorder, tiny_package, "--api-keys", keys, "--sequence-finish", 0)
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="module")
def shared(
    launcher: Launcher, recorder: Path, tiny_package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """For what uses nothing up."""
    keys = written(tmp_path_factory.mktemp("keys") / "keys.txt")
    process = launcher.start(recorder, tiny_package, "--api-keys", keys, "--sequence-finish", 0)
    yield process.wait_until_ready()
    process.stop()


def embedding(count: int = 2) -> bytes:
    x = {"name": "x", "datatype": "FP32", "shape": [count, stateful.WIDTH], "data": [0.5] * (count * stateful.WIDTH)}
    return json.dumps({"inputs": [x]}).encode()


def samples(server: ServerProcess) -> dict[tuple[str, ...], float]:
    """The metrics of clients, by name and labels."""
    text = server.ask("/metrics", headers=bearer(FREE))[2].decode()
    return {
        (sample.name.removeprefix("exportkit_client_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("exportkit_client_")
        for sample in family.samples
    }


# --- models -----------------------------------------------------------------------------------------------------------


def said(server: ServerProcess, path: str, key: str, body: bytes | None = None) -> tuple[int, Any]:
    status, _, content = server.ask(path, body, bearer(key))
    return status, json.loads(content)


def test_other_models_look_as_if_there_were_none(shared: ServerProcess) -> None:
    """As somebody would look for them, who has a key for one method."""
    for path in ("/v2/models/{}", "/v2/models/{}/ready", "/v2/models/{}/config", "/v2/models/{}/stats"):
        assert said(shared, path.format("recorder.embed"), EMBED)[0] == 200
        nothing = said(shared, path.format("nothing"), EMBED)
        assert nothing[0] == 404
        for name in ("tiny", "recorder", "recorder.push", "recorder.fill", "recorder.nothing"):
            status, answer = said(shared, path.format(name), EMBED)
            assert (status, answer["error"].replace(f"named {name}", "named nothing")) == (404, nothing[1]["error"])
    for name in ("tiny", "recorder", "recorder.push", "nothing"):
        status, answer = said(shared, f"/v2/models/{name}/infer", EMBED, embedding())
        assert status == 404
        assert answer["error"] == f"no model is named {name}. The models are recorder.embed."
    assert [each["name"] for each in said(shared, "/v2/repository/index", EMBED, b"{}")[1]] == ["recorder.embed"]
    assert [each["name"] for each in said(shared, "/v2/models/stats", EMBED)[1]["model_stats"]] == ["recorder.embed"]
    assert set(said(shared, "/v2/models/recorder.embed", EMBED)[1]["methods"]) == {"embed"}
    assert set(said(shared, "/v2/models/recorder.embed", FREE)[1]["methods"]) > {"embed", "push"}
    page = said(shared, "/page/status", EMBED)[1]
    assert ([each["name"] for each in page["models"]], page["others"]) == (["recorder.embed"], [])
    assert {each["name"] for each in said(shared, "/page/status", FREE)[1]["models"]} > {"tiny", "recorder.push"}


def test_a_method_by_its_parameter_is_hidden_too(shared: ServerProcess) -> None:
    words = []
    for method in ("push", "peek", "fill", "nothing"):
        body = {**json.loads(embedding()), "parameters": {"method": method}}
        status, answer = said(shared, EMBEDDING, EMBED, json.dumps(body).encode())
        assert status == 404
        words.append(answer["error"].replace(method, "nothing"))
    assert set(words) == {"the method `nothing` of recorder.embed is not served"}
    body = {**json.loads(embedding()), "parameters": {"method": "embed"}}
    assert said(shared, EMBEDDING, EMBED, json.dumps(body).encode())[0] == 200


def test_who_is_for_some_models_manages_none_and_reads_no_metrics(shared: ServerProcess) -> None:
    for name in ("recorder", "recorder.embed", "tiny", "nothing"):
        for change in ("load", "unload"):
            status, answer = said(shared, f"/v2/repository/models/{name}/{change}", EMBED, b"{}")
            assert (status, answer["error"]) == (
                403,
                "this API key may not load or unload models. It is for some models only.",
            )
    assert said(shared, "/metrics", EMBED)[0] == 403
    assert said(shared, EMBEDDING, EMBED, embedding())[0] == 200


def test_grpc_hides_them_too(shared: ServerProcess) -> None:
    headers = bearer(EMBED)
    with tritonclient.grpc.InferenceServerClient(shared.started["grpc"]) as client:
        assert client.is_model_ready("recorder.embed", headers=headers)
        for name in ("tiny", "recorder", "recorder.push", "nothing"):
            assert not client.is_model_ready(name, headers=headers)
            for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
                with pytest.raises(InferenceServerException, match=f"no model is named {name}") as refused:
                    ask(name, headers=headers)
                assert refused.value.status() == "StatusCode.NOT_FOUND"
        methods = client.get_model_config("recorder.embed", headers=headers).config.parameters["methods"].string_value
        assert set(json.loads(methods)) == {"embed"}
        index = client.get_model_repository_index(headers=headers)
        assert [each.name for each in index.models] == ["recorder.embed"]
        with pytest.raises(InferenceServerException, match="may not load or unload") as refused:
            client.unload_model("tiny", headers=headers)
        assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
        x = given(tritonclient.grpc, 0, 0)
        assert client.infer("recorder.embed", x, headers=headers).as_numpy("0").shape == (2, stateful.WIDTH)
        with pytest.raises(InferenceServerException, match="the method `push` of recorder"):
            client.infer("recorder.embed", x, headers=headers, parameters={"method": "push"})
        with pytest.raises(InferenceServerException, match="no model is named tiny"):
            client.infer("tiny", asking_tiny.triton_inputs(tritonclient.grpc, asking_tiny.arrays()), headers=headers)


@pytest.mark.parametrize("key", ["", EMBED, FREE])
def test_probes_hear_of_the_models_that_the_key_is_for(shared: ServerProcess, key: str) -> None:
    """Without one, of the server as a whole."""
    metadata = [("authorization", f"Bearer {key}")] if key else []

    def status(service: str) -> bytes | grpc.StatusCode:
        with grpc.insecure_channel(shared.started["grpc"]) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            try:
                return bytes(check(bytes([10, len(service)]) + service.encode(), metadata=metadata))
            except grpc.RpcError as error:
                return error.code()

    serving, unknown = b"\x08\x01", grpc.StatusCode.NOT_FOUND
    assert status("") == serving
    assert status("recorder.embed") == (serving if key else unknown)
    assert status("tiny") == (serving if key == FREE else unknown)


def test_a_stream_does_not_show_what_another_client_taught_it(shared: ServerProcess) -> None:
    """Requests like one before take a shorter way, which finds their model without its name."""
    answers: list[Any] = []
    headers = bearer(FREE)
    with tritonclient.grpc.InferenceServerClient(shared.started["grpc"]) as client:
        client.start_stream(lambda result, error: answers.append((result, error)), headers=headers)
        for step in range(3):
            client.async_stream_infer("recorder.push", given(tritonclient.grpc, 0, step), **which("taught", step, 9))
        shared.until(lambda: len(answers) == 3)
        client.stop_stream()
        assert all(error is None for _, error in answers)
        answers.clear()
        client.start_stream(lambda result, error: answers.append((result, error)), headers=bearer(EMBED))
        for step in range(3):
            client.async_stream_infer("recorder.push", given(tritonclient.grpc, 0, step), **which("taught", step, 9))
        shared.until(lambda: len(answers) == 3)
        client.stop_stream()
    assert all("no model is named recorder.push" in str(error) for _, error in answers)


# --- requests, rows, requests in flight -------------------------------------------------------------------------------


def test_what_is_beyond_is_refused_and_no_body_is_read(server: ServerProcess) -> None:
    """Two keys of one label have its limits together."""
    assert server.ask(EMBEDDING, embedding(), bearer(ONCE))[0] == 200
    status, headers, content = server.ask(EMBEDDING, embedding(), bearer(TWICE))
    assert (status, headers["retry-after"]) == (429, "100")
    assert json.loads(content)["error"] == "this API key may have 0.01 requests a second. Try again later."
    for path in ("/v2/models/recorder.embed", "/v2", "/v2/models/nothing", "/metrics", "/none"):
        assert server.ask(path, headers=bearer(ONCE))[0] == 429
    with socket.create_connection(server.address) as client:  # it sends no body, and hears without having been asked
        head = f"POST {EMBEDDING} HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer {ONCE}\r\nContent-Length: 100000000\r\n"
        client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert client.makefile("rb").readline() == b"HTTP/1.1 429 Too Many Requests\r\n"
    assert server.ask(EMBEDDING, embedding(), bearer(FREE))[0] == 200
    server.until(lambda: len(server.access_log) >= 9)
    refused = [line for line in server.access_log if line["status"] == 429]
    assert {(line["client"], line["reason"]) for line in refused} == {("once", "limit")}
    received = [line["received"] for line in refused if line["path"] == EMBEDDING]
    assert len(received) == 2
    assert 0 in received
    assert all(key not in server.errors for key in (ONCE, TWICE, FREE))
    counted = samples(server)
    assert counted["requests_total", "once"] == 1
    assert counted["rejected_total", "once", "requests"] == 7
    batched = said(server, "/v2/models/recorder.embed", FREE)[1]["batching"]["enabled"]
    assert counted["inference_total", "once"] == (2 if batched else 1)
    assert counted["request_duration_seconds_count", "once"] == 1
    assert {labels[1] for labels in counted} == {"embed", "rows", "once", "slow"}


def test_grpc_says_when_to_try_again(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.started["grpc"]) as channel:
        metadata = [("authorization", f"Bearer {ONCE}")]
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", metadata=metadata) == b"\x08\x01"
        for call in (live, channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(refused.value.trailing_metadata())
            assert (trailers["retry-after"], trailers["grpc-retry-pushback-ms"]) == ("100", "100000")


@both
def test_rows_are_counted_and_sequences_are_no_way_around(server: ServerProcess, protocol: Any) -> None:
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        client.infer("recorder.embed", given(protocol, 0, 0), headers=bearer(ONE_ROW))
        with pytest.raises(InferenceServerException, match=r"this API key may have 0\.01 rows a second"):
            client.infer("recorder.embed", given(protocol, 0, 0), headers=bearer(ONE_ROW))
        with pytest.raises(InferenceServerException, match=r"0\.01 rows a second"):
            client.infer("recorder.push", given(protocol, 0, 0), headers=bearer(ONE_ROW), **which(1, 0, 9))


def test_each_request_of_a_stream_counts_and_its_sequence_goes_on(server: ServerProcess, keys: Path) -> None:
    """Refused steps have not run. With a limit, steps take the way that counts them."""
    keys.write_text(f"{FREE}\n{ONE_ROW} label=rows rows=2 burst=4\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: any("read the API keys" in line for line in server.report))
    answers: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(server.started["grpc"]) as client:
        client.start_stream(lambda result, error: answers.append((result, error)), headers=bearer(ONE_ROW))
        for _ in range(60):
            client.async_stream_infer("recorder.push", given(tritonclient.grpc, 0, 0), **which("limited", 0))
        server.until(lambda: len(answers) == 60)
        time.sleep(1)
        client.async_stream_infer("recorder.push", given(tritonclient.grpc, 0, 1), **which("limited", 1))
        server.until(lambda: len(answers) == 61)
        client.stop_stream()
    refused = [str(error) for _, error in answers if error is not None]
    assert 0 < len(refused) < 60
    assert all("may have 2 rows a second" in error for error in refused)
    assert answers[-1][1] is None
    let_in = samples(server)["inference_total", "rows"]
    assert let_in in [rows * sum(error is None for _, error in answers) for rows in (1, 2)]  # a batch's rows, or one


def test_requests_in_flight(server: ServerProcess) -> None:
    with socket.create_connection(server.address) as client:  # one whose body does not come
        head = f"POST {EMBEDDING} HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer {SLOW}\r\nContent-Length: 1000\r\n\r\n"
        client.sendall(head.encode())
        server.until(lambda: samples(server)["requests_in_flight", "slow"] == 1)
        status, headers, content = server.ask(EMBEDDING, embedding(), bearer(SLOW))
        assert (status, headers["retry-after"]) == (429, "1")
        assert "at most 1 requests at the same time" in json.loads(content)["error"]
        assert server.ask(EMBEDDING, embedding(), bearer(FREE))[0] == 200
    server.until(lambda: samples(server)["requests_in_flight", "slow"] == 0)
    assert server.ask(EMBEDDING, embedding(), bearer(SLOW))[0] == 200


def test_limits_are_read_again_with_the_keys(server: ServerProcess, keys: Path) -> None:
    assert server.ask(EMBEDDING, embedding(), bearer(ONCE))[0] == 200
    assert server.ask(EMBEDDING, embedding(), bearer(ONCE))[0] == 429
    keys.write_text(f"{FREE}\n{ONCE} label=once requests=1000\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: server.ask(EMBEDDING, embedding(), bearer(ONCE))[0] == 200)
    assert server.ask(EMBEDDING, embedding(), bearer(EMBED))[0] == 401
    assert set(samples(server)) >= {("requests_total", "once")}
    keys.write_text(f"{ONCE} requests=none\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: any("the API keys stay as they were: line 1 of" in line for line in server.report))
    assert server.ask(EMBEDDING, embedding(), bearer(FREE))[0] == 200


def test_sequences_belong_to_the_label(server: ServerProcess, keys: Path) -> None:
    keys.write_text(f"{FREE}\n{ONCE} label=pair\n{TWICE} label=pair\n")
    server.signal(signal.SIGHUP)
    server.until(lambda: any("read the API keys" in line for line in server.report))
    with tritonclient.http.InferenceServerClient("{}:{}".format(*server.address)) as client:

        def step(key: str, number: int) -> np.ndarray[Any, Any]:
            x = inputs(tritonclient.http, x=rows(0, number))
            return client.infer("recorder.push", x, headers=bearer(key), **which("s", number, 9)).as_numpy("0")

        step(ONCE, 0)
        step(TWICE, 1)
        with pytest.raises(InferenceServerException, match="s"):
            step(FREE, 2)
