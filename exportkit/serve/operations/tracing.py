"""OpenTelemetry traces: a span for each request, by the conventions for HTTP and RPC servers."""

from __future__ import annotations

import os
import re
import threading
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import exportkit
from exportkit.serve.operations.observation import Finished

_NAMES = re.compile(r"(?<=/)(models(?!/stats$)|versions|region)/[^/]+")
_TEMPLATES = {"models": "models/{model}", "versions": "versions/{version}", "region": "region/{region}"}
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"])
_LAST_SECONDS = 3.0


class Traces:
    """Sends spans to a collector from a thread. A client's W3C `traceparent` becomes the parent."""

    def __init__(self, exporter: SpanExporter) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "exportkit"}
        resource = Resource.create({**named, "service.version": exportkit.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("exportkit.serve", exportkit.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, finished: Finished) -> None:
        """Makes the span of a request."""
        attributes = _of_http(finished) if finished.record.protocol == "http" else _of_rpc(finished)
        end = int(finished.ended * 1e9)
        span = self._tracer.start_span(
            _name(attributes),
            context=self._propagator.extract(finished.metadata),
            kind=SpanKind.SERVER,
            start_time=end - int(finished.seconds * 1e9),
            attributes={**attributes, **_of_request(finished)},
        )
        if finished.record.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Sends what is left, for a moment. A collector that does not answer does not hold up the end."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)


def traces_to(endpoint: str) -> Traces:
    """Returns traces that go to an OTLP endpoint over HTTP, such as `http://collector:4318/v1/traces`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(OTLPSpanExporter(endpoint=endpoint))


def _name(attributes: dict[str, Any]) -> str:
    if "rpc.method" in attributes:
        return str(attributes["rpc.method"])
    method = attributes["http.request.method"].replace("_OTHER", "HTTP")
    return f"{method} {attributes['http.route']}" if "http.route" in attributes else method


def _of_http(finished: Finished) -> dict[str, Any]:
    status, method = finished.record.status, finished.method
    attributes: dict[str, Any] = {
        "http.request.method": method if method in _METHODS else "_OTHER",
        "http.response.status_code": status,
        "url.path": finished.path,
        "url.scheme": finished.scheme or "http",
    }
    if finished.path and status != 404:  # the path of another URL would make a name for each client's mistake
        attributes["http.route"] = _NAMES.sub(lambda found: _TEMPLATES[found[1]], finished.path)
    if status >= 500:
        attributes["error.type"] = str(status)
    return attributes


def _of_rpc(finished: Finished) -> dict[str, Any]:
    error = finished.record.error
    code = "OK" if error is None else error.code
    attributes = {
        "rpc.system.name": "grpc",
        "rpc.method": finished.method.lstrip("/"),
        "rpc.response.status_code": code,
    }
    return attributes if finished.record.status < 500 else {**attributes, "error.type": code}


def _of_request(finished: Finished) -> dict[str, Any]:
    """What both ways in have: who asked, which model, and how it ran."""
    record, timing = finished.record, finished.record.timing
    attributes: dict[str, Any] = {"exportkit.request_id": record.id}
    if finished.remote:
        attributes["client.address"] = finished.remote
    if record.model:
        attributes |= {"exportkit.model": record.model, "exportkit.version": record.version}
    if record.sequence is not None:
        attributes["exportkit.sequence"] = str(record.sequence)
    if timing is not None:
        attributes |= {"exportkit.batch_size": timing.batch_rows, "exportkit.queue_ms": timing.queue * 1e3}
    return attributes
