"""OpenTelemetry traces: OpenTelemetry's own instrumentations make a span of each request, and we say more about it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

import exportkit
from exportkit.serve.request_record import RequestRecord

if TYPE_CHECKING:
    import grpc.aio
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LAST_SECONDS = 3.0


class Traces:
    """Sends spans to a collector from a thread. A client's W3C `traceparent` becomes the parent."""

    def __init__(self, exporter: SpanExporter) -> None:
        # Else the instrumentations would use the names of 2023.
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "exportkit"}
        resource = Resource.create({**named, "service.version": exportkit.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Returns an application around `app` that makes the spans of HTTP."""

        async def described(scope: Scope, receive: Receive, send: Send) -> None:
            async def describe(message: Message) -> None:
                if message["type"] == "http.response.start":  # a span ends with the last part of its answer
                    if (route := getattr(scope.get("route"), "path", None)) is not None:
                        trace.get_current_span().update_name(f"{scope['method']} {route}")
                        trace.get_current_span().set_attribute("http.route", route)
                    self(scope["exportkit"])
                await send(message)

            await app(scope, receive, describe)

        wrapped: ASGIApp = OpenTelemetryMiddleware(
            described,
            default_span_details=_by_method,
            tracer_provider=self._provider,
            exclude_spans=["receive", "send"],
        )
        return wrapped

    def interceptor(self) -> grpc.aio.ServerInterceptor:
        """Returns what makes the spans of gRPC."""
        from opentelemetry.instrumentation.grpc import aio_server_interceptor

        return aio_server_interceptor(tracer_provider=self._provider)

    def __call__(self, record: RequestRecord) -> None:
        """Says more about a request, whose span is the current one: its model, and how it ran."""
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attributes(_attributes(record))

    def close(self) -> None:
        """Sends what is left, for a moment. A collector that does not answer does not hold up the end."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)


def traces_to(endpoint: str) -> Traces:
    """Returns traces that go to an OTLP endpoint over HTTP, such as `http://collector:4318/v1/traces`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(OTLPSpanExporter(endpoint=endpoint))


def _by_method(scope: Scope) -> tuple[str, dict[str, Any]]:
    """Names a span until its route is known: the parser takes few methods, and clients make up any number of paths."""
    return scope["method"], {}


def _attributes(record: RequestRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {"exportkit.request_id": record.id}
    if record.model:
        attributes |= {"exportkit.model": record.model, "exportkit.version": record.version}
    if record.sequence is not None:
        attributes["exportkit.sequence"] = str(record.sequence)
    if record.timing is not None:
        attributes |= {
            "exportkit.batch_size": record.timing.batch_rows,
            "exportkit.queue_ms": record.timing.queue * 1e3,
        }
    return attributes
