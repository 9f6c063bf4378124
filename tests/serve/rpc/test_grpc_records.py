"""Every call leaves one record, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.rpc_calls import RpcCall
from exportkit.serve.statuses import QueueFullError
from tests.serve.rpc.echo import Served, served
from tests.serve.rpc.test_grpc_server import CHECK, INFER, STREAM, failure, request


class Seen(list[tuple[RpcCall, RequestRecord]]):
    """What an observer was shown, as it was then."""

    def __call__(self, call: RpcCall, record: RequestRecord) -> None:
        assert record.status  # it is complete
        self.append((call, record))

    def wait(self, echo: Served, number: int = 1) -> RequestRecord:
        """Returns the last of so many records. A client may have its answer before the server is done."""
        echo.until(lambda: len(self) >= number)
        assert len(self) == number
        return self[-1][1]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def echo(loop: asyncio.AbstractEventLoop, seen: Seen) -> Iterator[Served]:
    with served(loop, observe=seen, allow=lambda given: given != b"wrong") as opened:
        yield opened


def ended(record: RequestRecord) -> tuple[int, str]:
    return record.status, record.error.code if record.error else "OK"


def test_the_record_of_an_answer(echo: Served, seen: Seen, channel: grpc.Channel):
    traced = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    data = request()
    answer = channel.unary_unary(INFER)(data, metadata=(traced, ("x-request-id", "mine")))
    record = seen.wait(echo)
    call = seen[0][0]
    assert (call.method, call.remote, call.metadata["traceparent"]) == (INFER, "127.0.0.1", traced[1])
    assert (record.protocol, record.id, record.model, record.version) == ("grpc", "mine", "echo", "1")
    assert ended(record) == (200, "OK")
    assert (record.received_bytes, record.sent_bytes) == (len(data), len(answer))
    assert record.timing is not None


@pytest.mark.parametrize("given", [(), (("x-request-id", "not safe in a log"),), (("x-request-id-bin", b"1"),)])
def test_a_call_without_a_usable_id_gets_one_and_is_told(echo: Served, seen: Seen, channel: grpc.Channel, given: Any):
    _, call = channel.unary_unary(INFER).with_call(request(), metadata=given)
    assert dict(call.trailing_metadata())["x-request-id"] == seen.wait(echo).id
    assert len(seen.wait(echo).id) == 32


@pytest.mark.parametrize(
    ("method", "message", "key", "expected"),
    [
        (INFER, b"\xff", "", (400, "INVALID_ARGUMENT")),
        (INFER, request(model_version="9"), "", (404, "NOT_FOUND")),
        (INFER, request(), "wrong", (401, "UNAUTHENTICATED")),
        ("/inference.GRPCInferenceService/Nothing", b"", "", (501, "UNIMPLEMENTED")),
        (CHECK, b"\x0a\x01x", "", (404, "NOT_FOUND")),
    ],
)
def test_the_record_of_a_call_that_is_refused(
    echo: Served, seen: Seen, channel: grpc.Channel, method: str, message: bytes, key: str, expected: tuple[int, str]
):
    error = failure(channel, method, message, metadata=(("authorization", key), ("x-request-id", "mine")))
    assert ended(seen.wait(echo)) == expected
    assert dict(error.trailing_metadata())["x-request-id"] == seen.wait(echo).id == "mine"


def test_the_record_of_a_model_that_fails(echo: Served, seen: Seen, channel: grpc.Channel):
    echo.model.refusal = QueueFullError("full")
    failure(channel)
    echo.model.refusal = None
    echo.model.failure = RuntimeError("a secret of the server")
    failure(channel)
    seen.wait(echo, 2)
    assert [ended(record) for _, record in seen] == [(429, "RESOURCE_EXHAUSTED"), (500, "INTERNAL")]
    assert {record.model for _, record in seen} == {"echo"}
    assert "secret" not in str(seen[1][1].error)


@pytest.mark.parametrize("timeout", [None, 0.05])
def test_the_record_of_a_call_that_is_cut_off(echo: Served, seen: Seen, channel: grpc.Channel, timeout: float | None):
    echo.call(echo.model.gate.clear)
    call = channel.unary_unary(INFER).future(request(), timeout=timeout)
    if timeout is None:
        echo.until(lambda: echo.model.running == 1)
        call.cancel()
    assert ended(seen.wait(echo)) == ((499, "CANCELLED") if timeout is None else (504, "DEADLINE_EXCEEDED"))


def test_a_stream_is_a_record_and_so_is_each_request_in_it(echo: Served, seen: Seen, channel: grpc.Channel):
    messages = [request(), request(model_version="9"), request(3)]
    answers = list(channel.stream_stream(STREAM)(iter(messages)))
    seen.wait(echo, 4)
    *each, (_, whole) = seen
    assert sorted(ended(record) for _, record in each) == [(200, "OK"), (200, "OK"), (404, "NOT_FOUND")]
    assert sum(record.received_bytes for _, record in each) == whole.received_bytes == sum(map(len, messages))
    assert (ended(whole), whole.model, whole.sent_bytes) == ((200, "OK"), "", sum(map(len, answers)))


def test_the_records_of_a_stream_that_is_cancelled(echo: Served, seen: Seen, channel: grpc.Channel):
    echo.call(echo.model.gate.clear)
    stream = channel.stream_stream(STREAM)(iter([request(), request()]))
    echo.until(lambda: echo.model.running == 2)
    stream.cancel()
    seen.wait(echo, 3)
    assert [ended(record) for _, record in seen] == [(499, "CANCELLED")] * 3
