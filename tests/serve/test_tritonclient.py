"""Every public method of tritonclient's four clients works, or raises InferenceServerException with our words."""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from exportkit.serve.statuses import BackendError, NotOfferedError, NotServedError, ServeError
from tests.serve.echo_models import repository
from tests.serve.page.in_thread import Site
from tests.serve.protocol.messages import triton_inputs
from tests.serve.rpc.echo import Served, served

X = np.array([1.5, -2.0, 3.25], np.float32)
CLIENTS: dict[str, ModuleType] = {
    "HTTP": tritonclient.http,
    "HTTP, aio": tritonclient.http.aio,
    "gRPC": tritonclient.grpc,
    "gRPC, aio": tritonclient.grpc.aio,
}
HTTP, RPC = ("HTTP", "HTTP, aio"), ("gRPC", "gRPC, aio")


class Refused(NamedTuple):
    """The status and the words of an exception."""

    kind: type[ServeError]
    words: str


class Case(NamedTuple):
    """Arguments, and what is returned: a value, a test of the value, or a refusal. Inputs are added for `infer`."""

    arguments: tuple[Any, ...]
    expected: Any
    options: Mapping[str, Any] = {}
    clients: tuple[str, ...] = (*HTTP, *RPC)


def is_x(result: Any) -> bool:
    return bool((result.as_numpy("x") == X).all())


NOT_SERVED = Refused(NotServedError, "no model absent")
NO_TRACES = Refused(NotOfferedError, "trace settings cannot be read or changed|does not offer TraceSetting")
NO_LOGGING = Refused(NotOfferedError, "log settings cannot be read or changed|does not offer LogSettings")
NO_MEMORY = Refused(NotOfferedError, "does not offer (shared memory|(System|Cuda)SharedMemory)")
ECHO, ABSENT = ("echo",), ("absent",)
CASES: dict[str, list[Case]] = {
    "is_server_live": [Case((), True)],
    "is_server_ready": [Case((), True), Case((), True, {"query_params": {"verbose": "a b"}}, HTTP)],
    "is_model_ready": [
        *(Case(given, True) for given in (ECHO, ("broken down", "1"))),
        *(Case(given, False) for given in (("echo", "2"), ABSENT)),
    ],
    "get_server_metadata": [Case((), lambda found: found["name"] == "exportkit")],
    "get_model_metadata": [
        Case(ECHO, lambda found: found["name"] == "echo"),
        Case(("broken down", "1"), lambda found: found["name"] == "broken down"),
        Case(ABSENT, NOT_SERVED),
        Case(("a/b",), Refused(NotServedError, "there is nothing at GET /v2/models/a/b"), {}, HTTP),
        Case(("echo", "9"), Refused(NotServedError, "no model echo 9")),
    ],
    "get_model_config": [
        Case(ECHO, lambda found: found.get("config", found)["max_batch_size"] == 4),
        Case(("absent", "1"), Refused(NotServedError, "no model absent 1")),
    ],
    "get_inference_statistics": [
        Case((), lambda found: len(found["model_stats"]) == 3),
        Case(("echo", "1"), lambda found: [each["name"] for each in found["model_stats"]] == ["echo"]),
        Case(ABSENT, NOT_SERVED),
    ],
    "get_model_repository_index": [
        Case((), lambda found: (found if isinstance(found, list) else found["models"])[-1]["state"] == "UNAVAILABLE")
    ],
    "load_model": [Case(ECHO, None), Case(("broken",), Refused(BackendError, "the file is truncated"))],
    "unload_model": [Case(ECHO, None, {"unload_dependents": True}), Case(ABSENT, NOT_SERVED)],
    "update_trace_settings": [Case(given, NO_TRACES, {"settings": {"trace_level": "OFF"}}) for given in ((), ECHO)],
    "get_trace_settings": [Case((), NO_TRACES), Case(ECHO, NO_TRACES)],
    "update_log_settings": [Case(({"log_info": False},), NO_LOGGING)],
    "get_log_settings": [Case((), NO_LOGGING)],
    "get_system_shared_memory_status": [Case((), NO_MEMORY), Case(("region",), NO_MEMORY)],
    "register_system_shared_memory": [Case(("region", "/region", 4), NO_MEMORY)],
    "unregister_system_shared_memory": [Case((), NO_MEMORY), Case(("region",), NO_MEMORY)],
    "get_cuda_shared_memory_status": [Case((), NO_MEMORY), Case(("region",), NO_MEMORY)],
    "register_cuda_shared_memory": [Case(("region", b"aGFuZGxl", 0, 4), NO_MEMORY)],
    "unregister_cuda_shared_memory": [Case((), NO_MEMORY), Case(("region",), NO_MEMORY)],
    "infer": [
        Case(ECHO, is_x),
        Case(ECHO, lambda found: is_x(found) and "seven" in str(found.get_response()), {"request_id": "seven"}),
        Case(ECHO, is_x, {"model_version": "1", "priority": 1, "timeout": 10**7, "parameters": {"mine": "ours"}}),
        Case(ECHO, is_x, {"sequence_id": 3, "sequence_start": True}),
        *(
            Case(ECHO, is_x, {f"{which}_compression_algorithm": algorithm}, HTTP)
            for which in ("request", "response")
            for algorithm in ("gzip", "deflate")
        ),
        Case(ABSENT, NOT_SERVED),
        Case(("broken down",), Refused(BackendError, r"the server failed \(")),
        Case(
            ECHO,
            Refused(NotOfferedError, "`classification`"),
            {"outputs": [tritonclient.http.InferRequestedOutput("x", class_count=2)]},
            HTTP,
        ),
    ],
    "register_plugin": [Case((BasicAuth("user", "password"),), None)],
    "plugin": [Case((), None)],
    "close": [Case((), None)],
}
ELSEWHERE = {  # in the tests below; what makes and reads bodies, in protocol/test_client_bodies.py
    "HTTP": {"async_infer", "generate_request_body", "parse_response_body", "unregister_plugin"},
    "HTTP, aio": {"generate_request_body", "parse_response_body", "unregister_plugin"},
    "gRPC": {"async_infer", "start_stream", "stop_stream", "async_stream_infer", "unregister_plugin"},
    "gRPC, aio": {"stream_infer", "unregister_plugin"},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_every_public_method_of_a_client_is_tested(client: str) -> None:
    """A new tritonclient that can more makes this fail."""
    public = {name for name in dir(CLIENTS[client].InferenceServerClient) if not name.startswith("_")}
    assert public == CASES.keys() | ELSEWHERE[client]


@pytest.fixture(scope="module")
def rpc(loop: asyncio.AbstractEventLoop) -> Iterator[Served]:
    with served(loop, repository()) as server:
        yield server


def inputs(client: str, array: np.ndarray = X) -> list[Any]:
    return triton_inputs(tritonclient.http if client in HTTP else tritonclient.grpc, {"x": array})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_method_of_a_client(site: Site, rpc: Served, client: str, name: str) -> None:
    address = f"127.0.0.1:{site.port}" if client in HTTP else rpc.address
    make = CLIENTS[client].InferenceServerClient

    def found(case: Case) -> Any:
        options = {**case.options, "inputs": inputs(client)} if name == "infer" else case.options
        if not client.endswith("aio"):
            with make(address) as blocking:
                return getattr(blocking, name)(*case.arguments, **options)

        async def awaited() -> Any:
            async with make(address) as aio:
                result = getattr(aio, name)(*case.arguments, **options)
                return await result if asyncio.iscoroutine(result) else result

        return rpc.run(awaited())

    for case in (case for case in CASES[name] if client in case.clients):
        check(lambda: found(case), case.expected)  # noqa: B023  (it is called at once)


def check(outcome: Callable[[], Any], expected: Any) -> None:
    if isinstance(expected, Refused):
        with pytest.raises(InferenceServerException) as raised:
            outcome()
        assert raised.value.status() in (str(expected.kind.status), f"StatusCode.{expected.kind.code}")
        assert re.search(expected.words, raised.value.message())
        return
    found = outcome()
    found = MessageToDict(found, preserving_proto_field_name=True) if isinstance(found, Message) else found
    assert expected(found) if callable(expected) else found == expected


@pytest.fixture(params=["HTTP", "gRPC"])
def blocking(request: pytest.FixtureRequest, site: Site, rpc: Served) -> Iterator[tuple[str, Any]]:
    """The name of a client, and a client."""
    address = f"127.0.0.1:{site.port}" if request.param == "HTTP" else rpc.address
    with CLIENTS[request.param].InferenceServerClient(address) as client:
        yield request.param, client


def test_a_plugin_is_registered_and_unregistered(blocking: tuple[str, Any]) -> None:
    _, client = blocking
    client.register_plugin(BasicAuth("user", "password"))
    assert client.is_server_live()
    client.unregister_plugin()
    assert client.plugin() is None


@pytest.mark.parametrize(("model", "expected"), [("echo", is_x), ("absent", NOT_SERVED)])
def test_async_infer_answers(blocking: tuple[str, Any], model: str, expected: Any) -> None:
    name, client = blocking

    def outcome() -> Any:
        if name == "HTTP":
            return client.async_infer(model, inputs(name)).get_result()
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.async_infer(model, inputs(name), lambda result, error: answers.put((result, error)))
        result, error = answers.get()
        if error is not None:
            raise error
        return result

    check(outcome, expected)


# --- gRPC -------------------------------------------------------------------------------------------------------------


def test_a_stream_answers_every_request_in_order(rpc: Served) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    arrays = [np.full((3,), index, np.float32) for index in range(100)]
    with tritonclient.grpc.InferenceServerClient(rpc.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for index, array in enumerate(arrays):
            model = "absent" if index == 50 else "echo"
            client.async_stream_infer(model, inputs("gRPC", array), request_id=str(index))
        client.stop_stream()
    received = [answers.get() for _ in arrays]
    assert received.pop(50)[1].message() == "no model absent "
    del arrays[50]
    for array, (result, error) in zip(arrays, received):
        assert error is None
        assert result.get_response().id == str(int(array[0]))
        assert np.array_equal(result.as_numpy("x"), array)


def test_a_stream_of_the_aio_client(rpc: Served) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for model in ("echo", "absent", "echo"):
            yield {"model_name": model, "inputs": inputs("gRPC")}

    async def call() -> list[tuple[Any, Any]]:
        async with tritonclient.grpc.aio.InferenceServerClient(rpc.address) as client:
            return [answer async for answer in client.stream_infer(requests())]

    (first, _), (none, error), (last, _) = rpc.run(call())
    assert is_x(first)
    assert (none, error.message()) == (None, "no model absent ")
    assert is_x(last)


def test_the_index_of_what_is_ready(rpc: Served) -> None:
    request = tritonclient.grpc.service_pb2.RepositoryIndexRequest(ready=True)
    with tritonclient.grpc.InferenceServerClient(rpc.address) as client:
        assert [model.name for model in client._client_stub.RepositoryIndex(request).models][-1] == "broken down"


def test_parameters_of_a_load_reach_the_repository(echo: Served) -> None:
    with tritonclient.grpc.InferenceServerClient(echo.address) as client:
        client.load_model("echo", config='{"name": "echo"}', files={"file:1/model.pt2": b"code"})
    assert echo.repository.asked == [("load", "echo", {"config": '{"name": "echo"}', "file:1/model.pt2": b"code"})]


def test_a_load_goes_on_when_its_client_goes_away(echo: Served) -> None:
    echo.call(echo.repository.loading.clear)
    with (
        tritonclient.grpc.InferenceServerClient(echo.address) as client,
        pytest.raises(InferenceServerException, match="Deadline Exceeded"),
    ):
        client.load_model("echo", client_timeout=0.05)
    echo.call(echo.repository.loading.set)
    echo.until(lambda: echo.repository.asked == [("load", "echo", {})])
