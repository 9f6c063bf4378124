"""A request is a span of OpenTelemetry's own instrumentations, of which we say what the model did."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.operations.observation import Observation
from exportkit.serve.operations.tracing import Traces
from tests.serve.echo_models import repository
from tests.serve.http.asking import ask, infer_body
from tests.serve.operations.server_processes import Launcher
from tests.serve.rpc import echo as rpc
from tests.serve.rpc.echo import served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
INFER = "/v2/models/echo/infer"
BODY, LENGTH = infer_body(("x", "FP32", [2], bytes(8)), parameters={"sequence_id": 7})


def span_of(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    app = Observation([traces]).wrap(make_app(repository(), HttpOptions()), lambda: False)
    ask(traces.wrap(app), method, path, body, headers)
    traces.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_over_http_says_what_the_model_did() -> None:
    span = span_of("POST", INFER, BODY, {**LENGTH, "x-request-id": "the-id"})
    assert (span.name, span.kind) == ("POST /v2/models/{model}/infer", SpanKind.SERVER)
    attributes = dict(span.attributes or {})
    expected = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v2/models/{model}/infer",
        "url.path": INFER,
        "url.scheme": "http",
        "exportkit.request_id": "the-id",
        "exportkit.model": "echo",
        "exportkit.version": "1",
        "exportkit.batch_size": 1,
        "exportkit.queue_ms": 0.0,
        "exportkit.sequence": "7",
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert span.resource.attributes["service.name"] == "exportkit"
    assert span.parent is None


@pytest.mark.parametrize(
    ("method", "path", "name", "failed"),
    [
        ("GET", "/v2/models/echo/versions/1/ready", "GET /v2/models/{model}/versions/{version}/ready", False),
        ("GET", "/v2/models/none", "GET /v2/models/{model}", False),
        ("GET", "/v2/anything", "GET", False),  # a client's mistake makes no name
        ("POST", "/v2/models/broken down/infer", "POST /v2/models/{model}/infer", True),
    ],
)
def test_names_are_few_and_only_a_failure_of_the_server_is_an_error(
    method: str, path: str, name: str, failed: bool
) -> None:
    span = span_of(method, path, BODY if method == "POST" else b"", LENGTH if method == "POST" else None)
    assert (span.name, span.status.status_code is StatusCode.ERROR) == (name, failed)


def test_a_call_over_grpc_is_a_span_and_goes_on_with_the_clients_trace(loop: asyncio.AbstractEventLoop) -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    options = {"interceptors": [traces.interceptor()], "observe": lambda _, record: traces(record)}
    with served(loop, **options) as server, grpc.insecure_channel(server.address) as channel:
        channel.unary_unary(rpc.INFER)(rpc.request(), metadata=[("traceparent", f"00-{TRACE}-{PARENT}-01")])
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == (rpc.INFER, SpanKind.SERVER)
    assert (span.attributes or {})["exportkit.model"] == "echo"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT


def test_a_servers_spans_reach_a_collector(launcher: Launcher, tiny_package: Path) -> None:
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
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        server = launcher.start(tiny_package, "--traces", url, "--no-grpc").wait_until_ready()
        assert server.ask("/v2/models/tiny")[0] == 200
        assert server.stop() == 0
        collector.shutdown()
        thread.join()
    assert {path for path, _ in received} == {"/v1/traces"}
    assert any(b"GET /v2/models/{model}" in content for _, content in received)
