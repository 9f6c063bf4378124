"""How calls end, and their records: errors, deadlines, cancellation, limits, keys, drain, health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from exportkit.errors import HostError
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.rpc.inference_service import MOST_REQUESTS
from exportkit.serve.statuses import BadRequestError
from tests.serve.echo_models import EchoModel, EchoRepository
from tests.serve.memory import traced_memory
from tests.serve.rpc.echo import INFER, STREAM, Seen, Served, request, served

READY = "/inference.GRPCInferenceService/ServerReady"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
UNLIMITED = [("grpc.max_receive_message_length", -1)]


def failure(channel: grpc.Channel, method: str = INFER, message: bytes | None = None, **options: Any) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(method)(request() if message is None else message, timeout=60, **options)
    return raised.value


def streamed(answers: Any, count: int) -> list[Any]:
    return [service_pb2.ModelStreamInferResponse.FromString(next(answers)) for _ in range(count)]


# --- how a call ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u6f22", "\n", "%"])
def test_a_long_text_still_arrives_as_the_error_that_it_is(echo: Served, channel: grpc.Channel, letter: str):
    echo.model.failure = BadRequestError(f"the beginning {letter * 20_000}")
    error = failure(channel)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"the beginning {letter * 300}")


def test_bytes_that_are_no_message_are_refused_in_a_stream(channel: grpc.Channel):
    bad = [b"\xff", b"\x0a\x05echo", b"\x3a\xff\xff\xff\xff\x0f", b"\x00"]
    answers = streamed(channel.stream_stream(STREAM)(iter(bad)), len(bad))
    assert all("are not a message inference.ModelInferRequest" in answer.error_message for answer in answers)


def test_a_call_without_a_message_is_refused(channel: grpc.Channel):
    with pytest.raises(grpc.RpcError) as raised:
        channel.stream_unary(INFER)(iter(()))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == f"{INFER} was called without a message"


def test_a_method_that_is_unknown_is_refused(channel: grpc.Channel):
    for method in ("/inference.GRPCInferenceService/Nothing", "/other.Service/ModelInfer"):
        error = failure(channel, method)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error.details() == f"this server does not offer {method.rpartition('/')[2]}"


def test_a_request_that_was_refused_is_not_kept(channel: grpc.Channel):
    same = [service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="INT8", shape=[1])] * 2
    message = request(3 << 20, inputs=same)
    with traced_memory() as memory:
        for _ in range(10):
            assert "two inputs" in failure(channel, message=message).details()
    assert memory.left < 5 << 20


def test_while_a_request_waits_its_inputs_are_in_memory_once(echo: Served, channel: grpc.Channel):
    message = request(32 << 20)
    echo.model.hold()
    with traced_memory() as memory:
        call = channel.unary_unary(INFER).future(message)
        echo.until(lambda: echo.model.running == 1)
    assert memory.left < 36 << 20
    echo.model.release()
    assert len(call.result()) > 32 << 20


# --- every call leaves one record, however it ends --------------------------------------------------------------------


def wait(seen: Seen, echo: Served, number: int = 1) -> RequestRecord:
    """Returns the last of so many records. A client may have its answer before the server is done."""
    echo.until(lambda: len(seen) >= number)
    assert len(seen) == number
    return seen[-1][1]


def ended(record: RequestRecord) -> tuple[int, str]:
    return record.status, record.error.code if record.error else "OK"


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
    assert (error.code().name, *ended(wait(seen, echo))) == (expected[1], *expected)
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


# --- deadlines and cancellation ---------------------------------------------------------------------------------------


def test_a_stream_reads_so_many_requests_and_takes_them_along_when_it_is_cancelled(echo: Served, channel: grpc.Channel):
    echo.model.hold()
    stream = channel.stream_stream(STREAM)(iter([request()] * (MOST_REQUESTS + 50)))
    echo.until(lambda: echo.model.running == MOST_REQUESTS)
    stream.cancel()
    echo.until(lambda: echo.model.cancelled == MOST_REQUESTS)
    assert echo.model.running == 0
    assert len(echo.model.requests) == MOST_REQUESTS


def test_a_stream_whose_answers_nobody_takes_is_read_no_further(echo: Served):
    with grpc.insecure_channel(echo.address, [("grpc.http2.lookahead_bytes", 1 << 16), *UNLIMITED]) as channel:
        sent = MOST_REQUESTS + 300
        stream = channel.stream_stream(STREAM)(iter([request(1 << 20)] * sent))
        echo.until(lambda: len(echo.model.requests) >= MOST_REQUESTS)
        echo.run(asyncio.sleep(0.3))
        assert len(echo.model.requests) < sent
        assert all(len(answer.infer_response.raw_output_contents[0]) == 1 << 20 for answer in streamed(stream, sent))


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_message_beyond_every_model_is_refused_and_the_server_goes_on(
    loop: asyncio.AbstractEventLoop, compression: Any
):
    repository = EchoRepository(EchoModel(max_body=6 << 20))
    with served(loop, repository) as echo, grpc.insecure_channel(echo.address, UNLIMITED) as channel:
        large = failure(channel, message=request(8 << 20), compression=compression)
        assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # What gRPC lets through, because names and parameters need room, the model refuses.
        echo.model.room = 6 << 20
        error = failure(channel, message=request((6 << 20) + 1), compression=compression)
        assert error.details() == "as many bytes wait as may"
        assert echo.model.requests == []
        assert len(channel.unary_unary(INFER)(request(6 << 20), compression=compression)) > 6 << 20


def test_models_beyond_2_gib_do_not_overflow_the_limit(loop: asyncio.AbstractEventLoop):
    repository = EchoRepository(EchoModel(max_body=1 << 50))
    with served(loop, repository) as echo, grpc.insecure_channel(echo.address, UNLIMITED) as channel:
        assert len(channel.unary_unary(INFER)(request(9 << 20))) > 9 << 20


def test_more_connections_than_allowed_are_closed_at_once(loop: asyncio.AbstractEventLoop):
    own = [("grpc.use_local_subchannel_pool", 1)]  # or channels share a connection
    with served(loop, max_connections=1) as echo, grpc.insecure_channel(echo.address, own) as first:
        assert first.unary_unary(INFER)(request())
        with grpc.insecure_channel(echo.address, own) as second:
            assert failure(second).code() is grpc.StatusCode.UNAVAILABLE
            assert first.unary_unary(INFER)(request())
            first.close()
            assert second.unary_unary(INFER)(request(), wait_for_ready=True, timeout=60)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_only_who_has_a_key_is_answered(loop: asyncio.AbstractEventLoop):
    right, keys = (("authorization", "Bearer right"),), {b"Bearer right"}
    with served(loop, allow=keys.__contains__) as echo, grpc.insecure_channel(echo.address, UNLIMITED) as channel:
        for method in (INFER, READY, STREAM, "/inference.GRPCInferenceService/RepositoryModelUnload"):
            for metadata in ((), (("authorization", "Bearer wrong"),), (("x-key", "Bearer right"),)):
                error = failure(channel, method, metadata=metadata)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "authorization: Bearer KEY" in error.details()
        error = failure(channel, metadata=right + right)  # of two, a proxy may have checked the other
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "authorization 2 times" in error.details()
        # The key is checked before a message is there.
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            channel.stream_unary(INFER)(iter(lambda: echo.run(asyncio.sleep(1, b"")), None))
        assert echo.model.requests == []
        assert echo.repository.asked == []
        assert channel.unary_unary(INFER)(request(), metadata=right)
        assert channel.unary_unary(CHECK)(b"") == b"\x08\x01"  # a probe has no key


def test_a_key_that_is_removed_ends_the_answers_of_a_stream(loop: asyncio.AbstractEventLoop):
    keys = {b"Bearer right"}
    with served(loop, allow=keys.__contains__) as echo, grpc.insecure_channel(echo.address) as channel:

        def requests() -> Iterator[bytes]:
            yield request()
            echo.until(lambda: len(echo.model.requests) == 1)
            keys.clear()
            yield request()

        stream = channel.stream_stream(STREAM)(requests(), metadata=(("authorization", "Bearer right"),))
        first, second = streamed(stream, 2)
        assert not first.error_message
        assert "no valid API key" in second.error_message


# --- starting and stopping --------------------------------------------------------------------------------------------


def test_what_runs_is_answered_before_the_server_stops(echo: Served, channel: grpc.Channel):
    echo.model.hold()
    running = channel.unary_unary(INFER).future(request())
    stream = channel.stream_stream(STREAM)(iter(lambda: b"" if echo.model.cancelled else request(), b""))
    echo.until(lambda: echo.model.running == 1 + MOST_REQUESTS)
    echo.repository.draining = True
    assert channel.unary_unary(READY)(b"") == b""  # proto3 leaves false out
    stopping = echo.begin(echo.server.stop(60))
    echo.model.release()
    assert running.result()
    answers = []
    with contextlib.suppress(grpc.RpcError):  # its client would send more for ever, and may meet a closed connection
        for answer in stream:
            answers.append(answer)
    assert len(answers) == MOST_REQUESTS
    assert stream.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    stopping.result()


def test_what_is_not_answered_in_time_is_cut_off(echo: Served, channel: grpc.Channel):
    echo.model.hold()
    running = channel.unary_unary(INFER).future(request())
    echo.until(lambda: echo.model.running == 1)
    echo.run(echo.server.stop(0.05))
    assert running.exception() is not None
    assert echo.model.cancelled == 1


def test_clients_that_are_stuck_do_not_hold_up_the_end(echo: Served):
    """One is in the middle of a message, and none answers gRPC's last ping."""

    def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
        return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    fields = b"\x83\x86\x04" + text(INFER) + b"\x01" + text("x") + b"\x0f\x10" + text("application/grpc")
    begins = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
    in_message = frame(1, 4, 1, fields + b"\0" + text("te") + text("trailers")) + frame(0, 0, 1, b"\0\0\0\0\x09half")
    address = ("127.0.0.1", echo.server.port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as stuck:
        silent.sendall(begins)
        stuck.sendall(begins + in_message)
        assert silent.recv(9)
        assert stuck.recv(9)
        began = time.monotonic()
        echo.run(echo.server.stop(60))
        assert time.monotonic() - began < 30


def test_a_port_that_is_taken_is_refused(echo: Served):
    with pytest.raises(HostError, match=f"cannot listen on 127.0.0.1:{echo.server.port}"):
        echo.call(lambda: GrpcServer(echo.repository, RpcOptions(port=echo.server.port)))


# --- health -----------------------------------------------------------------------------------------------------------

# The bytes of HealthCheckRequest and HealthCheckResponse, by https://github.com/grpc/grpc/blob/master/doc/health-checking.md
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def service(name: str) -> bytes:
    return b"\x0a" + bytes([len(name)]) + name.encode() if name else b""


@pytest.mark.parametrize("name", ["", "inference.GRPCInferenceService", "echo"])
def test_health_follows_the_models(echo: Served, channel: grpc.Channel, name: str):
    check = channel.unary_unary(CHECK)
    assert check(service(name)) == SERVING
    echo.model.ready = False
    assert check(service(name)) == NOT_SERVING
    echo.model.ready = True
    echo.repository.draining = True
    assert check(service(name)) == NOT_SERVING


def test_health_of_what_is_unknown(channel: grpc.Channel):
    error = failure(channel, CHECK, service("unknown"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    watch = channel.unary_stream(WATCH)(service("unknown"))
    assert next(watch) == SERVICE_UNKNOWN
    watch.cancel()


def test_watch_tells_changes_and_ends_with_the_server(echo: Served, channel: grpc.Channel):
    watch = channel.unary_stream(WATCH)(service("echo"))
    assert next(watch) == SERVING
    echo.model.ready = False
    assert next(watch) == NOT_SERVING
    echo.model.ready = True
    assert next(watch) == SERVING
    stopping = echo.begin(echo.server.stop(60))  # which a Watch does not hold up
    assert list(watch) == [NOT_SERVING]
    stopping.result()


def test_clients_without_a_key_cannot_watch_in_any_number(
    echo: Served, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("exportkit.serve.rpc.grpc_server.MOST_WATCHES", 1)
    watch = channel.unary_stream(WATCH)(b"")
    assert next(watch) == SERVING
    with pytest.raises(grpc.RpcError, match="watch already") as refused:
        next(channel.unary_stream(WATCH)(b""))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    watch.cancel()
    until = time.monotonic() + 10
    while True:  # until the server heard of it
        try:
            assert next(channel.unary_stream(WATCH)(b"")) == SERVING
            return
        except grpc.RpcError:
            assert time.monotonic() < until
