"""A request ends alike over HTTP, over gRPC and in a stream of gRPC: with its status, its text, and one record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pytest
from tritonclient.grpc import service_pb2

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import CancelledError, ServeError
from tests.serve.echo_models import EchoRepository
from tests.serve.http.asking import Reply, ask, asked, infer_body
from tests.serve.rpc.echo import INFER, STREAM, Seen, request, served


class Ended(NamedTuple):
    text: str  # of the refusal; empty: it was answered
    told: dict[str, str]  # headers, or what follows a call
    record: RequestRecord


class Http:
    def __init__(self, repository: EchoRepository) -> None:
        self.model, self._app = repository.models()[0], make_app(repository, HttpOptions())

    def ask(self, version: str = "1", **parameters: int) -> Ended:
        body, headers = infer_body(("x", "INT8", [1], b"1"), parameters=parameters)
        path, named = f"/v2/models/echo/versions/{version}/infer", {**headers, "x-request-id": "mine"}
        reply = ask(self._app, "POST", path, body, named)
        record = reply.scope["exportkit"]
        assert (reply.status, record.sent_bytes) == (record.status, len(reply.body))
        return Ended("" if reply.status == 200 else reply.error, reply.headers, record)

    def leave(self) -> RequestRecord:
        async def left() -> Reply:
            leaves = asyncio.Event()
            body, headers = infer_body(("x", "INT8", [1], b"1"))
            sent = asked(self._app, "POST", "/v2/models/echo/infer", body, headers, leaves=leaves)
            asking = asyncio.ensure_future(sent)
            while not self.model.running:
                await asyncio.sleep(0)
            leaves.set()
            return await asking

        reply = asyncio.run(left())
        assert reply.status == 0
        return reply.scope["exportkit"]


class Rpc:
    def __init__(self, server: Any, channel: grpc.Channel, seen: Seen, *, streams: bool) -> None:
        self.model, self._server, self._channel = server.model, server, channel
        self._seen, self._streams = seen, streams

    def begin(self, data: bytes) -> Any:
        metadata = (("x-request-id", "mine"),)
        if self._streams:
            return self._channel.stream_stream(STREAM)(iter([data]), metadata=metadata)
        return self._channel.unary_unary(INFER).future(data, metadata=metadata)

    def record(self) -> RequestRecord:
        self._server.until(lambda: len(self._seen) == 1 + self._streams)
        return self._seen[0][1]

    def ask(self, version: str = "1", **parameters: int) -> Ended:
        given = {name: service_pb2.InferParameter(int64_param=value) for name, value in parameters.items()}
        call = self.begin(request(model_version=version, parameters=given))
        if self._streams:
            (answer,) = call
            return Ended(service_pb2.ModelStreamInferResponse.FromString(answer).error_message, {}, self.record())
        code, record = call.code(), self.record()
        assert code.name == (record.error.code if record.error else "OK")
        return Ended(call.details(), dict(call.trailing_metadata()), record)

    def leave(self) -> RequestRecord:
        call = self.begin(request())
        self._server.until(lambda: self.model.running == 1)
        call.cancel()
        record = self.record()
        assert {each.status for _, each in self._seen} == {record.status}  # of a stream, too
        return record


@pytest.fixture
def repository() -> EchoRepository:
    return EchoRepository()


@pytest.fixture(params=["HTTP", "gRPC", "stream"])
def way(
    request: pytest.FixtureRequest, repository: EchoRepository, loop: asyncio.AbstractEventLoop
) -> Iterator[Http | Rpc]:
    """One that asks, and goes away while it waits."""
    if request.param == "HTTP":
        yield Http(repository)
        return
    seen = Seen()
    with served(loop, repository, observe=seen) as server, grpc.insecure_channel(server.address) as channel:
        yield Rpc(server, channel, seen, streams=request.param == "stream")


def every_status(kind: type[ServeError] = ServeError) -> Iterator[type[ServeError]]:
    for each in kind.__subclasses__():
        yield each
        yield from every_status(each)


@pytest.mark.parametrize("kind", sorted({*every_status()} - {CancelledError}, key=lambda kind: kind.__name__))
def test_every_error_has_its_status_its_text_and_when_to_try_again(way: Http | Rpc, kind: type[ServeError]) -> None:
    way.model.failure = kind("why", hint="Do this")
    text, told, record = way.ask()
    assert (text, record.status, record.error.code, record.model) == ("why. Do this", kind.status, kind.code, "echo")
    again = kind.retry_after if told else None  # a stream has no place for it
    wanted = {} if again is None else {"retry-after": f"{again}", "grpc-retry-pushback-ms": f"{again}000"}
    if isinstance(way, Http):
        wanted.pop("grpc-retry-pushback-ms", None)
    assert {name: value for name, value in told.items() if "retry" in name} == wanted


def test_a_fault_of_ours_is_in_the_log_and_not_in_the_answer(way: Http | Rpc, caplog: pytest.LogCaptureFixture) -> None:
    way.model.failure = KeyError("a secret of the server")
    text, _, record = way.ask()
    assert (text.partition(". Its log says ")[0], record.status) == ("the server failed (KeyError)", 500)
    assert caplog.text.count("a secret of the server") == 1
    assert ("request mine:" in caplog.text) == isinstance(way, Http)
    assert "secret" not in str(record.error)


def test_the_record_of_an_answer_says_what_became_of_it(way: Http | Rpc) -> None:
    text, told, record = way.ask()
    assert (text, record.status, record.error) == ("", 200, None)
    assert record.protocol == ("http" if isinstance(way, Http) else "grpc")
    assert (record.id, record.model, record.version, told.get("x-request-id", "mine")) == ("mine", "echo", "1", "mine")
    assert record.received_bytes > 0 < record.sent_bytes
    assert record.timing is not None


def test_records_name_only_models_that_are_served(way: Http | Rpc) -> None:
    """They become labels of metrics, of which strangers may not make any number."""
    text, _, record = way.ask(version="2")
    assert text == "no model echo 2"
    assert (record.model, record.version, record.status, record.error.reason) == ("", "", 404, "invalid")


def test_a_timeout_that_passes_is_said(way: Http | Rpc) -> None:
    way.model.hold()
    text, _, record = way.ask(timeout=10_000)
    assert (text, record.status) == ("the request's timeout passed while it waited", 504)


def test_who_goes_away_leaves_the_queue(way: Http | Rpc) -> None:
    way.model.hold()
    record = way.leave()
    assert (record.status, record.error.code, record.error.reason) == (499, "CANCELLED", "cancelled")
    assert (way.model.cancelled, way.model.running, way.model.held) == (1, 0, 0)
