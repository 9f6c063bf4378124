"""A server as it is run: real processes, real sockets, tritonclient."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.operations.asking_tiny import INFER, arrays, body, expected, mean, triton_inputs
from tests.serve.operations.server_processes import ROOT, Launcher, ServerProcess

ENDED = ["draining: what was accepted is answered, what is new is refused", "every accepted request was answered"]


@pytest.fixture(scope="module")
def server(launcher: Launcher, tiny_package: Path) -> Iterator[ServerProcess]:
    """A server with every default, as a user starts it."""
    process = launcher.start_as_a_user(tiny_package)
    yield process.wait_until_ready()
    assert process.stop() == 0
    assert process.report[3:] == ENDED  # and nothing of what clients did wrong


def metrics(server: ServerProcess) -> dict[tuple[str, ...], float]:
    """The samples of /metrics, by their name and the values of their labels."""
    status, headers, text = server.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


# --- a server that runs -----------------------------------------------------------------------------------------------


def test_it_says_where_it_listens_and_what_it_serves(server: ServerProcess, tiny_package: Path):
    assert server.started["pid"] == server.pid
    assert server.started["models"] == [{"name": "tiny", "version": "1", "devices": ["cpu"]}]
    http, address = server.started["http"], server.started["grpc"]
    assert server.report == [
        f"listening on {http}; loading models",
        f"model tiny, version 1, on cpu, from {tiny_package}",
        f"ready: HTTP on {http}, gRPC on {address}",
    ]
    assert server.ask("/v2/health/ready")[0] == 200
    assert server.ask("/")[0] == 200


def test_requests_are_counted_by_what_became_of_them(server: ServerProcess):
    before = metrics(server)

    def more(*sample: str) -> float:
        return after.get(sample, 0.0) - before.get(sample, 0.0)

    for _ in range(3):
        assert server.ask(INFER, body())[0] == 200
    assert server.ask(INFER, b"{}")[0] == 400
    assert server.ask("/v2/models/none")[0] == 404
    with triton_grpc.InferenceServerClient(server.started["grpc"]) as client:
        client.infer("tiny", triton_inputs(triton_grpc, arrays(batch=2)))
        with pytest.raises(triton_grpc.InferenceServerException, match="no model is named none"):
            client.get_model_metadata("none")
    # gRPC's answers leave before they are counted.
    server.until(lambda: metrics(server).get(("exportkit_requests_total", "grpc", "404")))
    after = metrics(server)
    assert more("exportkit_request_success_total", "tiny", "1") == 4
    assert more("exportkit_request_duration_seconds_count", "tiny", "1") == 4
    assert more("exportkit_request_duration_seconds_bucket", "+Inf", "tiny", "1") == 4
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert more(f"exportkit_{stage}_duration_seconds_count", "tiny", "1") == 4
        assert more(f"exportkit_{stage}_duration_seconds_sum", "tiny", "1") > 0
    batches = more("exportkit_execution_total", "tiny", "1")
    assert 1 <= batches <= 4
    assert more("exportkit_inference_total", "tiny", "1") == more("exportkit_batch_rows_sum", "tiny", "1")
    assert more("exportkit_batch_rows_count", "tiny", "1") == batches
    assert more("exportkit_rejected_total", "tiny", "invalid", "1") == 1
    assert more("exportkit_rejected_total", "", "invalid", "") == 2
    assert more("exportkit_requests_total", "http", "200") >= 4  # with the questions for metrics
    assert more("exportkit_requests_total", "grpc", "404") == 1
    assert after["exportkit_model_load_seconds", "tiny", "1"] > 0
    assert after["exportkit_model_ready", "tiny", "1"] == 1
    assert after["exportkit_runners", "tiny", "1"] == 1
    for gauge in ("runner_busy", "pending_requests", "queue_rows", "queue_bytes"):
        assert after[f"exportkit_{gauge}", "tiny", "1"] == 0
    assert after["process_resident_memory_bytes",] > 1e7
    assert not [sample for sample in after if sample[0].endswith("_created")]


SEQUENCES = {"sequences", "sequence_state_bytes", "sequence_oldest_seconds", "sequences_ended_total"}


def test_the_documents_name_every_metric(server: ServerProcess):
    server.ask("/v2/none")
    names = {name.removeprefix("exportkit_") for name, *_ in metrics(server) if name.startswith("exportkit_")}
    names = {re.sub("_(count|sum|bucket)$", "", name) for name in names}
    document = (ROOT / "docs" / "serving.md").read_text()
    table = document.partition("| metric | counts |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:]))) == {
        *names,
        "request_failure_total",  # there is one after the first failure
        *SEQUENCES,  # there are for packages with state: test_sequences_of_clients.py
    }


def test_metrics_come_in_the_form_of_openmetrics_too(server: ServerProcess):
    status, headers, text = server.ask("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert (status, text.endswith(b"# EOF\n")) == (200, True)
    assert headers["content-type"].startswith("application/openmetrics-text")


def test_every_request_is_a_line_of_json_in_the_access_log(server: ServerProcess):
    server.ask(INFER, body(), {"X-Request-Id": "mine"})
    server.ask("/v2/nothing%0A%7B%22forged%22:1%7D?q=%1b", headers={"X-Request-Id": 'a", "b": "'})
    with triton_grpc.InferenceServerClient(server.started["grpc"]) as client:
        client.infer("tiny", triton_inputs(triton_grpc, arrays()), headers={"x-request-id": "theirs"})
    server.until(lambda: len({line["id"] for line in server.access_log} & {"mine", "theirs"}) == 2)
    server.until(lambda: any("nothing" in line["path"] for line in server.access_log))
    by_id = {line["id"]: line for line in server.access_log}
    mine, theirs = by_id["mine"], by_id["theirs"]
    assert (mine["method"], mine["path"], mine["status"], mine["protocol"]) == ("POST", INFER, 200, "http")
    assert (theirs["method"], theirs["status"]) == ("/inference.GRPCInferenceService/ModelInfer", 200)
    assert theirs["protocol"] == "grpc"
    assert mine["received"] == len(body())
    for line in (mine, theirs):
        assert (line["model"], line["version"], line["remote"]) == ("tiny", "1", "127.0.0.1")
        assert line["ms"] >= line["compute_ms"] > 0
        assert line["queue_ms"] >= 0
        assert line["batch_rows"] >= 1
        assert line["received"] > 0 < line["sent"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    forged = next(line for line in server.access_log if "nothing" in line["path"])
    assert forged["path"] == "/v2/nothing%0A%7B%22forged%22:1%7D"
    assert (forged["status"], forged["reason"], forged["model"]) == (404, "invalid", "")
    assert re.fullmatch(r"[0-9a-f]{32}", forged["id"])
    assert not [line for line in server.access_log if "forged" in line]


def test_the_access_log_names_the_model_that_is_asked_for_and_leaves_probes_out(server: ServerProcess):
    server.ask("/v2/health/ready/", headers={"X-Request-Id": "probe"})
    server.ask("/v2/models/tiny/ready", headers={"X-Request-Id": "probe"})
    asked = {"load": "tiny", "metadata": "tiny", "config": "tiny", "unload": "none", "infer": "none"}
    server.ask("/v2/repository/models/tiny/load", b"{}", {"X-Request-Id": "HTTP-load"})
    server.ask("/v2/models/tiny", headers={"X-Request-Id": "HTTP-metadata"})
    server.ask("/v2/models/tiny/config", headers={"X-Request-Id": "HTTP-config"})
    server.ask("/v2/repository/models/none/unload", b"{}", {"X-Request-Id": "HTTP-unload"})
    server.ask("/v2/models/none/infer", b"{}", {"X-Request-Id": "HTTP-infer"})
    with triton_grpc.InferenceServerClient(server.started["grpc"]) as client:
        assert client.is_server_ready(headers={"x-request-id": "probe"})
        assert client.is_model_ready("tiny", headers={"x-request-id": "probe"})
        client.load_model("tiny", headers={"x-request-id": "gRPC-load"})
        client.get_model_metadata("tiny", headers={"x-request-id": "gRPC-metadata"})
        client.get_model_config("tiny", headers={"x-request-id": "gRPC-config"})
        with pytest.raises(triton_grpc.InferenceServerException):
            client.unload_model("none", headers={"x-request-id": "gRPC-unload"})
        with pytest.raises(triton_grpc.InferenceServerException):
            client.infer("none", triton_inputs(triton_grpc, arrays()), headers={"x-request-id": "gRPC-infer"})
    wanted = {f"{way}-{what}": name for way in ("HTTP", "gRPC") for what, name in asked.items()}
    server.until(lambda: wanted.keys() <= {line["id"] for line in server.access_log})
    found = {line["id"]: line["model"] for line in server.access_log}
    assert {key: found[key] for key in wanted} == wanted
    assert "probe" not in found


def test_a_server_without_a_model_says_so_and_that_nothing_is_watched(launcher: Launcher, tmp_path: Path):
    server = launcher.start("--model-repository", tmp_path, "--no-grpc").wait_until_ready()
    (said,) = server.report[1:-1]
    assert said.startswith(f"no model: {tmp_path} has no FILE.pt2")
    assert "It is not watched" in said
    assert server.stop() == 0


def test_cuda_graphs_on_a_cpu_are_refused_in_words_of_the_command_line(launcher: Launcher, tiny_package: Path):
    server = launcher.start(tiny_package, "--no-grpc", "--device", "cpu", "--cuda-graphs")
    assert server.wait() == 2
    assert "--cuda-graphs" in server.report[-1]
    assert "--device cuda" in server.report[-1]


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(
    server: ServerProcess, launcher: Launcher, tiny_package: Path, option: str
):
    port = server.address[1] if option == "--port" else int(server.started["grpc"].rpartition(":")[2])
    second = launcher.start(tiny_package, option, port)
    assert second.wait() == 4
    assert second.report == [
        f"error: port {port} of 127.0.0.1 is in use by another process",
        f"  End that process (`ss -ltnp 'sport = :{port}'` names it), or give another port with {option}.",
    ]
    assert server.ask("/v2/health/live")[0] == 200


# --- how it ends ------------------------------------------------------------------------------------------------------


class Held:
    """A request that was accepted, and whose body is not complete."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._body = body()
        self._connection = socket.create_connection(server.address)
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\n\r\n"
        self._connection.sendall(head.encode() + self._body[:20])
        # Its room in the queue says that the server has read so far.
        server.until(lambda: metrics(server)["exportkit_requests_in_flight",] == 2)

    def finish(self) -> tuple[bytes, np.ndarray[Any, Any]]:
        self._connection.sendall(self._body[20:])
        head, _, answer = self._connection.makefile("rb").read().partition(b"\r\n\r\n")
        return head, mean(answer)


def is_draining(server: ServerProcess) -> bool:
    return any(line.startswith("draining") for line in server.report)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_accepted_is_answered_after_a_signal_and_what_is_new_is_refused(
    launcher: Launcher, tiny_package: Path, end: signal.Signals
):
    server = launcher.start(tiny_package).wait_until_ready()
    held = Held(server)
    kept = HTTPConnection(*server.address)
    kept.request("GET", "/v2/health/ready")
    assert (kept.getresponse().read(), kept.sock is not None) == (b'{"ready":true}', True)
    with triton_grpc.InferenceServerClient(server.started["grpc"]) as client:
        assert client.is_server_ready()
        server.signal(end)
        server.until(lambda: is_draining(server))
        kept.request("GET", "/v2/health/ready")
        response = kept.getresponse()
        assert (response.status, response.getheader("connection"), response.read()) == (
            503,
            "close",
            b'{"error":"the server drains"}',
        )
        assert server.ask("/v2/health/live")[0] == 200
        status, headers, answer = server.ask(INFER, body())
        assert (status, headers["retry-after"]) == (503, "1")
        assert "drains" in json.loads(answer)["error"]
        assert (client.is_server_ready(), client.is_server_live()) == (False, True)
        with pytest.raises(triton_grpc.InferenceServerException, match="drains") as refusal:
            client.infer("tiny", triton_inputs(triton_grpc, arrays()))
        assert refusal.value.status() == "StatusCode.UNAVAILABLE"
    head, answered = held.finish()
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head
    np.testing.assert_allclose(answered, expected(arrays()), rtol=1e-5)
    assert server.wait() == 0
    assert server.report[-2:] == ENDED
    with pytest.raises(ConnectionRefusedError):
        server.ask("/v2/health/live")


def test_no_request_of_a_busy_server_is_lost_when_it_ends(launcher: Launcher, tiny_package: Path):
    server = launcher.start(tiny_package).wait_until_ready()
    statuses: list[Any] = []

    def hammer() -> None:
        """Asks until the port is closed. A request that was sent on a fresh connection gets an answer."""
        while True:
            try:
                connection = socket.create_connection(server.address)
            except ConnectionRefusedError:
                return
            with connection:
                request = body()
                head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(request)}\r\n"
                try:
                    connection.sendall(head.encode() + b"\r\n" + request)
                    answer = connection.makefile("rb").read()
                except (ConnectionResetError, BrokenPipeError):
                    answer = b""
                statuses.append(int(answer.split()[1]) if answer else None)

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    server.until(lambda: statuses.count(200) > 50)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    for thread in threads:
        thread.join()
    # A connection that the kernel had taken and the server had not, when its port was closed, was never accepted.
    assert set(statuses) - {None} <= {200, 503}
    logged = [line["status"] for line in server.access_log if line["path"] == INFER]
    assert logged.count(200) == statuses.count(200)
    assert statuses.count(None) <= 8


def test_the_drain_timeout_ends_it_with_1_and_says_so(launcher: Launcher, tiny_package: Path):
    server = launcher.start(tiny_package, "--drain-timeout", "0.3", "--no-grpc").wait_until_ready()
    held = Held(server)
    server.signal(signal.SIGTERM)
    assert server.wait() == 1
    assert server.report[-1] == (
        "error: accepted requests were not answered within 0.3 seconds. --drain-timeout allows more."
    )
    del held


def test_a_second_ctrl_c_ends_it_at_once(launcher: Launcher, tiny_package: Path):
    server = launcher.start(tiny_package, "--no-grpc").wait_until_ready()
    held = Held(server)
    server.signal(signal.SIGINT)
    server.until(lambda: is_draining(server))
    server.signal(signal.SIGTERM)  # does not
    assert server.ask("/v2/health/live")[0] == 200
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert server.report[-1] == "interrupted"
    del held


def test_while_models_are_loaded_it_is_live_and_a_signal_ends_it(launcher: Launcher, tiny_package: Path):
    endless = "import exportkit.serve.engine.repository as r, time; r.load_replicas = lambda *_: time.sleep(3600)"
    server = launcher.start(tiny_package, before=endless)
    server.until(lambda: "listening" in server.errors)
    assert server.ask("/v2/health/live")[0] == 200
    assert server.ask("/v2/health/ready")[0] == 503
    status, headers, answer = server.ask(INFER, body())
    assert (status, headers["retry-after"]) == (503, "1")
    assert "the model tiny is not ready" in json.loads(answer)["error"]
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.report[1:] == ["ended before the models were loaded"]


def test_a_package_that_cannot_be_loaded_ends_it_with_the_exit_code_of_the_reason(
    launcher: Launcher, tiny_package: Path, tmp_path: Path
):
    content = bytearray(tiny_package.read_bytes())
    content[len(content) // 2] ^= 1  # in the middle of compiled code, which is read when it is loaded
    (tmp_path / "changed.pt2").write_bytes(content)
    server = launcher.start(tmp_path / "changed.pt2")
    assert server.wait() == 3
    assert "listening on" in server.errors
    assert "error: " in server.errors
    assert not server.started
