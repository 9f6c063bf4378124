"""Every call leaves one record, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from exportkit.serve.request_record import RequestRecord
from tests.serve.rpc.echo import INFER, STREAM, Seen, Served, request, served
from tests.serve.rpc.test_grpc_server import CHECK, failure


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def echo(loop: asyncio.AbstractEventLoop, seen: Seen) -> Iterator[Served]:
    with served(loop, observe=seen, allow=lambda given: given != b"wrong") as opened:
        yield opened


def wait(seen: Seen, echo: Served, number: int = 1) -> RequestRecord:
    """Returns the last of so many records. A client may have its answer before the server is done."""
    echo.until(lambda: len(seen) >= number)
    assert len(seen) == number
    return seen[-1][1]


def ended(record: RequestRecord) -> tuple[int, str]:
    return record.status, record.error.code if record.error else "OK"


def test_the_record_of_an_answer_has_its_call_and_its_sizes(echo: Served, seen: Seen, channel: grpc.Channel):
    answer = channel.unary_unary(INFER)(request(), metadata=(("traceparent", "00-1-2-01"),))
    record = wait(seen, echo)
    call = seen[0][0]
    assert (call.method, call.remote, call.metadata["traceparent"]) == (INFER, "127.0.0.1", "00-1-2-01")
    assert (record.received_bytes, record.sent_bytes) == (len(request()), len(answer))


@pytest.mark.parametrize("given", [(), (("x-request-id", "not safe in a log"),), (("x-request-id-bin", b"1"),)])
def test_a_call_without_a_usable_id_gets_one_and_is_told(echo: Served, seen: Seen, channel: grpc.Channel, given: Any):
    _, call = channel.unary_unary(INFER).with_call(request(), metadata=given)
    assert dict(call.trailing_metadata())["x-request-id"] == wait(seen, echo).id
    assert len(wait(seen, echo).id) == 32


@pytest.mark.parametrize(
    ("method", "message", "key", "expected"),
    [
        (INFER, b"\xff", "", (400, "INVALID_ARGUMENT")),
        (INFER, request(), "wrong", (401, "UNAUTHENTICATED")),
        ("/inference.GRPCInferenceService/Nothing", b"", "", (501, "UNIMPLEMENTED")),
        (CHECK, b"\x0a\x01x", "", (404, "NOT_FOUND")),
    ],
)
def test_the_record_of_a_call_that_is_refused(
    echo: Served, seen: Seen, channel: grpc.Channel, method: str, message: bytes, key: str, expected: tuple[int, str]
):
    error = failure(channel, method, message, metadata=(("authorization", key), ("x-request-id", "mine")))
    assert ended(wait(seen, echo)) == expected
    assert dict(error.trailing_metadata())["x-request-id"] == wait(seen, echo).id == "mine"


def test_the_record_of_a_call_whose_deadline_passes(echo: Served, seen: Seen, channel: grpc.Channel):
    echo.model.hold()
    call = channel.unary_unary(INFER).future(request(), timeout=0.05)
    assert ended(wait(seen, echo)) == (504, "DEADLINE_EXCEEDED")
    assert call.exception() is not None


def test_a_stream_is_a_record_and_so_is_each_request_in_it(echo: Served, seen: Seen, channel: grpc.Channel):
    messages = [request(), request(model_version="9"), request(3)]
    answers = list(channel.stream_stream(STREAM)(iter(messages)))
    wait(seen, echo, 4)
    *each, (_, whole) = seen
    assert sorted(ended(record) for _, record in each) == [(200, "OK"), (200, "OK"), (404, "NOT_FOUND")]
    assert sum(record.received_bytes for _, record in each) == whole.received_bytes == sum(map(len, messages))
    assert (ended(whole), whole.model, whole.sent_bytes) == ((200, "OK"), "", sum(map(len, answers)))
