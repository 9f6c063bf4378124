from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from exportkit.serve.operations.observation import Finished
from exportkit.serve.operations.tracing import Traces, traces_to
from exportkit.serve.protocol.inference import InferTiming
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import BackendError, BadRequestError, NotReadyError, NotServedError, ServeError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def finished(
    method: str = "POST", path: str = "/v2/models/tiny/infer", *, error: ServeError | None = None, **metadata: str
) -> Finished:
    record = RequestRecord("http" if path else "grpc", "the-id", model="tiny", version="1", status=200)
    if error is None:
        record.timing = InferTiming(0.002, 0.001, 0.005, 0.001, batch_rows=3)
    else:
        record.failed(error)
    scheme = "https" if path else ""
    return Finished(record, method, path, "192.0.2.1", metadata, seconds=0.25, scheme=scheme, ended=1_700_000_000.5)


def span_of(request: Finished) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    traces(request)
    traces.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_over_http_follows_the_conventions():
    span = span_of(finished())
    assert (span.name, span.kind) == ("POST /v2/models/{model}/infer", SpanKind.SERVER)
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v2/models/{model}/infer",
        "url.path": "/v2/models/tiny/infer",
        "url.scheme": "https",
        "client.address": "192.0.2.1",
        "exportkit.request_id": "the-id",
        "exportkit.model": "tiny",
        "exportkit.version": "1",
        "exportkit.batch_size": 3,
        "exportkit.queue_ms": 2.0,
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time, span.end_time - span.start_time) == (1_700_000_000_500_000_000, 250_000_000)
    assert span.resource.attributes["service.name"] == "exportkit"
    assert span.parent is None


def test_a_step_names_its_sequence():
    for sequence in (7, "7"):
        request = finished()
        request.record.sequence = sequence
        assert (span_of(request).attributes or {})["exportkit.sequence"] == "7"


def test_a_call_over_grpc_follows_the_conventions():
    span = span_of(finished("/inference.GRPCInferenceService/ModelInfer", ""))
    assert span.name == "inference.GRPCInferenceService/ModelInfer"
    attributes = dict(span.attributes or {})
    assert attributes["rpc.system.name"] == "grpc"
    assert attributes["rpc.method"] == "inference.GRPCInferenceService/ModelInfer"
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["exportkit.batch_size"] == 3
    assert not [name for name in attributes if name.startswith(("http.", "url.", "gen_ai."))]


@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", ""])
def test_the_clients_trace_goes_on(path: str):
    span = span_of(finished("POST", path, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1"))
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("header", ["", "00-", f"00-{'0' * 32}-{PARENT}-01", "x" * 10_000])
def test_a_traceparent_that_is_none_begins_a_new_trace(header: str):
    assert span_of(finished(traceparent=header)).parent is None


@pytest.mark.parametrize(
    ("error", "code", "failed"),
    [
        (BackendError("x"), "INTERNAL", True),
        (NotReadyError("x"), "UNAVAILABLE", True),
        (BadRequestError("x"), "INVALID_ARGUMENT", False),
    ],
)
def test_only_a_failure_of_the_server_is_an_error(error: ServeError, code: str, failed: bool):
    for request, attribute, value in [
        (finished(error=error), "http.response.status_code", error.status),
        (finished("/a.b/C", "", error=error), "rpc.response.status_code", code),
    ]:
        span = span_of(request)
        attributes = dict(span.attributes or {})
        assert attributes[attribute] == value
        assert ("error.type" in attributes) is failed
        assert (span.status.status_code is StatusCode.ERROR) is failed


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/v2/models/a/versions/7/ready", "GET /v2/models/{model}/versions/{version}/ready"),
        ("POST", "/v2/systemsharedmemory/region/r/register", "POST /v2/systemsharedmemory/region/{region}/register"),
        ("GET", "/v2/models/stats", "GET /v2/models/stats"),
        ("GET", "/v2/health/live", "GET /v2/health/live"),
        ("PROPFIND", "/v2", "HTTP /v2"),
    ],
)
def test_names_of_spans_are_few(method: str, path: str, name: str):
    assert span_of(finished(method, path)).name == name


def test_a_url_that_does_not_exist_makes_no_name():
    span = span_of(finished("GET", "/v2/anything", error=NotServedError("x")))
    assert span.name == "GET"
    assert "http.route" not in (span.attributes or {})


def test_spans_reach_a_collector():
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        traces = traces_to(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        traces(finished())
        traces.close()
        collector.shutdown()
        thread.join()
    ((path, content),) = received
    assert path == "/v1/traces"
    assert b"POST /v2/models/{model}/infer" in content
