"""How calls end: keys, deadlines, cancellation, overload, drain, limits, failures, health."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from exportkit.errors import HostError
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.rpc.inference_service import MOST_REQUESTS
from exportkit.serve.statuses import BackendError, BadRequestError, NotReadyError, QueueFullError, ServeError
from tests.serve.rpc.echo_models import EchoModel, EchoRepository
from tests.serve.rpc.serving_echo import Served, served

INFER = "/inference.GRPCInferenceService/ModelInfer"
READY = "/inference.GRPCInferenceService/ServerReady"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
UNLIMITED = [("grpc.max_receive_message_length", -1)]


def request(size: int = 1, **fields: Any) -> bytes:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="INT8", shape=[size])
    message = service_pb2.ModelInferRequest(
        model_name="echo", inputs=[tensor], raw_input_contents=[bytes(size)], **fields
    )
    return bytes(message.SerializeToString())


@pytest.fixture
def channel(echo: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(echo.address, UNLIMITED) as channel:
        yield channel


def failure(channel: grpc.Channel, method: str = INFER, message: bytes | None = None, **options: Any) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(method)(request() if message is None else message, timeout=60, **options)
    return raised.value


# --- how a call ends --------------------------------------------------------------------------------------------------


def test_an_error_has_its_status_and_its_text(echo: Served, channel: grpc.Channel):
    echo.model.failure = BackendError("the operator raised", hint="Look at its inputs")
    error = failure(channel)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "the operator raised. Look at its inputs"


def every_status(kind: type[ServeError] = ServeError) -> Iterator[type[ServeError]]:
    for each in kind.__subclasses__():
        yield each
        yield from every_status(each)


@pytest.mark.parametrize("kind", sorted(every_status(), key=lambda kind: kind.__name__))
def test_every_error_of_a_server_has_a_grpc_status(echo: Served, channel: grpc.Channel, kind: type[ServeError]):
    echo.model.failure = kind("why")
    error = failure(channel)
    assert error.code().name == kind.code
    assert error.details() == "why"


@pytest.mark.parametrize(
    "refusal", [QueueFullError("1024 rows wait, and at most 1024 may"), NotReadyError("the server drains")]
)
def test_a_refusal_that_passes_says_when_to_try_again(echo: Served, channel: grpc.Channel, refusal: ServeError):
    echo.model.refusal = refusal
    error = failure(channel)
    assert error.code().name in {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    trailers = dict(error.trailing_metadata())
    assert trailers["retry-after"] == "1"
    assert trailers["grpc-retry-pushback-ms"] == "1000"
    assert echo.model.requests == []


def test_a_refusal_that_stays_does_not_say_when_to_try_again(channel: grpc.Channel):
    assert "retry-after" not in dict(failure(channel, message=request(model_version="9")).trailing_metadata())


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u6f22", "\n", "%"])
def test_a_long_text_still_arrives_as_the_error_that_it_is(echo: Served, channel: grpc.Channel, letter: str):
    echo.model.failure = BadRequestError(f"the beginning {letter * 20_000}")
    error = failure(channel)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"the beginning {letter * 300}")


def test_a_fault_of_ours_is_in_the_log_and_not_in_the_answer(
    echo: Served, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
):
    echo.model.failure = KeyError("a secret of the server")
    error = failure(channel)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "the server failed (KeyError). Its log says more"
    assert "a secret of the server" in caplog.text
    echo.model.failure = None
    assert channel.unary_unary(INFER)(request())


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05echo", b"\x3a\xff\xff\xff\xff\x0f", b"\x00"])
def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel, message: bytes):
    assert failure(channel, message=message).code() is grpc.StatusCode.INVALID_ARGUMENT
    if message != b"\x3a\xff\xff\xff\xff\x0f":  # a message without fields takes a field that it does not know
        assert failure(channel, READY, message).code() is grpc.StatusCode.INVALID_ARGUMENT


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


# --- deadlines and cancellation ---------------------------------------------------------------------------------------


def test_a_timeout_that_passes_is_said(echo: Served, channel: grpc.Channel):
    echo.call(echo.model.gate.clear)
    error = failure(channel, message=request(parameters={"timeout": service_pb2.InferParameter(int64_param=10_000)}))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "the request's timeout passed while it waited"


def test_the_deadline_of_a_call_ends_what_waits(echo: Served, channel: grpc.Channel):
    echo.call(echo.model.gate.clear)
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(INFER)(request(), timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    echo.until(lambda: echo.model.running == 0)


def test_a_call_that_is_cancelled_leaves_the_queue(echo: Served, channel: grpc.Channel):
    echo.call(echo.model.gate.clear)
    call = channel.unary_unary(INFER).future(request())
    echo.until(lambda: echo.model.running == 1)
    call.cancel()
    echo.until(lambda: echo.model.cancelled == 1)
    assert echo.model.running == 0


def test_a_client_that_vanishes_leaves_the_queue(echo: Served):
    echo.call(echo.model.gate.clear)
    channel = grpc.insecure_channel(echo.address)
    call = channel.unary_unary(INFER).future(request())
    echo.until(lambda: echo.model.running == 1)
    channel.close()
    echo.until(lambda: echo.model.cancelled == 1)
    assert call.cancelled() or call.exception() is not None


def test_a_stream_that_is_cancelled_takes_all_its_requests_along(echo: Served):
    echo.call(echo.model.gate.clear)
    with triton.InferenceServerClient(echo.address) as client:
        client.start_stream(lambda result, error: None)
        x = triton.InferInput("x", [1], "INT8").set_data_from_numpy(np.zeros(1, np.int8))
        for _ in range(MOST_REQUESTS + 50):
            client.async_stream_infer("echo", [x])
        echo.until(lambda: echo.model.running == MOST_REQUESTS)  # and the stream is read no further
        client.stop_stream(cancel_requests=True)
    echo.until(lambda: echo.model.cancelled == MOST_REQUESTS)
    assert echo.model.running == 0


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_message_beyond_every_model_is_refused_and_the_server_goes_on(loop: asyncio.AbstractEventLoop):
    repository = EchoRepository(EchoModel(max_body=6 << 20))
    with served(loop, repository) as echo, grpc.insecure_channel(echo.address, UNLIMITED) as channel:
        assert failure(channel, message=request(8 << 20)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # What gRPC lets through, because names and parameters need room, the model refuses.
        error = failure(channel, message=request((6 << 20) + 1))
        assert (error.code(), error.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "6291457 bytes are more than 6291456",
        )
        assert echo.model.requests == []
        assert len(channel.unary_unary(INFER)(request(6 << 20))) > 6 << 20


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_the_limit_is_for_the_decompressed_message(loop: asyncio.AbstractEventLoop, compression: grpc.Compression):
    repository = EchoRepository(EchoModel(max_body=1))
    with served(loop, repository) as echo, grpc.insecure_channel(echo.address) as channel:
        echo.model.max_body = 1 << 40  # gRPC keeps to its limit
        error = failure(channel, message=request(12 << 20), compression=compression)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert echo.model.requests == []


BOMB = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
try:
    channel.unary_unary(sys.argv[2])(bytes(100_000_000), compression=grpc.Compression.Gzip)
except grpc.RpcError as error:
    print(error.code().name)
"""


def test_a_bomb_is_not_inflated(loop: asyncio.AbstractEventLoop):
    def peak() -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) << 10

    with served(loop, EchoRepository(EchoModel(max_body=1))) as echo:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak()
        done = subprocess.run(
            [sys.executable, "-c", BOMB, echo.address, INFER], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "RESOURCE_EXHAUSTED"
        assert peak() - before < 50 << 20


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
    right = (("authorization", "Bearer right"),)
    opened = served(loop, allow=lambda given: given == b"Bearer right")
    with opened as echo, grpc.insecure_channel(echo.address, UNLIMITED) as channel:
        for method in (INFER, READY, "/inference.GRPCInferenceService/RepositoryModelUnload"):
            for metadata in ((), (("authorization", "Bearer wrong"),), (("x-key", "Bearer right"),)):
                error = failure(channel, method, metadata=metadata)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "authorization: Bearer KEY" in error.details()
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            next(channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([request()])))
        error = failure(channel, metadata=right + right)  # of two, a proxy may have checked the other
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "authorization 2 times" in error.details()
        assert echo.model.requests == []
        assert echo.repository.asked == []
        assert channel.unary_unary(INFER)(request(), metadata=right)
        assert channel.unary_unary(CHECK)(b"") == b"\x08\x01"  # a probe has no key


# --- starting and stopping --------------------------------------------------------------------------------------------


def test_what_runs_is_answered_before_the_server_stops(echo: Served, channel: grpc.Channel):
    echo.call(echo.model.gate.clear)
    running = channel.unary_unary(INFER).future(request())
    echo.until(lambda: echo.model.running == 1)
    echo.call(lambda: setattr(echo.repository, "draining", True))
    assert failure(channel).code() is grpc.StatusCode.UNAVAILABLE
    assert channel.unary_unary(READY)(b"") == b""  # proto3 leaves false out
    stopping = echo.begin(echo.server.stop(60))
    echo.call(echo.model.gate.set)
    assert running.result()
    stopping.result()


def test_what_is_not_answered_in_time_is_cut_off(echo: Served, channel: grpc.Channel):
    echo.call(echo.model.gate.clear)
    running = channel.unary_unary(INFER).future(request())
    echo.until(lambda: echo.model.running == 1)
    echo.run(echo.server.stop(0.05))
    assert running.exception() is not None
    assert echo.model.cancelled == 1


def test_a_port_that_is_taken_is_refused(loop: asyncio.AbstractEventLoop, echo: Served):
    async def make() -> None:
        GrpcServer(EchoRepository(), RpcOptions(port=echo.server.port))

    with pytest.raises(HostError, match=f"cannot listen on 127.0.0.1:{echo.server.port}"):
        echo.run(make())


def test_addresses_of_ipv6(loop: asyncio.AbstractEventLoop):
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with served(loop, host="::1") as echo, grpc.insecure_channel(f"[::1]:{echo.server.port}") as channel:
        assert channel.unary_unary(CHECK)(b"") == b"\x08\x01"


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A key and its certificate for localhost."""
    folder = tmp_path_factory.mktemp("pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return (folder / "key.pem").read_bytes(), (folder / "certificate.pem").read_bytes()


def test_tls_and_certificates_of_clients(loop: asyncio.AbstractEventLoop, pem: tuple[bytes, bytes]):
    credentials = grpc.ssl_server_credentials([pem], pem[1], require_client_auth=True)
    with served(loop, credentials=credentials) as echo:
        address = f"localhost:{echo.server.port}"
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(pem[1], *pem)) as channel:
            assert channel.unary_unary(CHECK)(b"") == b"\x08\x01"
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(pem[1])) as channel:
            assert failure(channel).code() is grpc.StatusCode.UNAVAILABLE
        with grpc.insecure_channel(address) as channel:
            assert failure(channel).code() is grpc.StatusCode.UNAVAILABLE


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
