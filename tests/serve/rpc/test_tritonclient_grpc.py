"""Every public method of tritonclient's gRPC clients works, or raises an error whose message is ours."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as aio
from google.protobuf.json_format import ParseDict
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from tests.serve.rpc.echo import Served

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def given(array: np.ndarray = X) -> blocking.InferInput:
    return blocking.InferInput("x", list(array.shape), "FP32").set_data_from_numpy(array)


def echoes(result: Any) -> bool:
    return np.array_equal(result.as_numpy("x"), X)


# What both clients have: the arguments, and what holds of the result, or the method that is not offered. Streams are
# below: the clients differ there.
BOTH: dict[str, tuple[tuple[Any, ...], Callable[[Any], bool] | str]] = {
    "is_server_live": ((), lambda live: live is True),
    "is_server_ready": ((), lambda ready: ready is True),
    "is_model_ready": (("echo",), lambda ready: ready is True),
    "get_server_metadata": ((), lambda metadata: metadata.name == "exportkit"),
    "get_model_metadata": (("echo",), lambda metadata: list(metadata.inputs[0].shape) == [-1, 3]),
    "get_model_config": (("echo",), lambda config: config.config.max_batch_size == 4),
    "get_model_repository_index": ((), lambda index: [m.state for m in index.models] == ["READY", "UNAVAILABLE"]),
    "load_model": (("echo",), lambda result: result is None),
    "unload_model": (("echo",), lambda result: result is None),
    "get_inference_statistics": (("echo",), lambda found: found.model_stats[0].inference_stats.success.count == 1),
    "update_trace_settings": ((), "TraceSetting"),
    "get_trace_settings": ((), "TraceSetting"),
    "update_log_settings": (({"log_info": True},), "LogSettings"),
    "get_log_settings": ((), "LogSettings"),
    "get_system_shared_memory_status": ((), "SystemSharedMemoryStatus"),
    "register_system_shared_memory": (("region", "/region", 8), "SystemSharedMemoryRegister"),
    "unregister_system_shared_memory": ((), "SystemSharedMemoryUnregister"),
    "get_cuda_shared_memory_status": ((), "CudaSharedMemoryStatus"),
    "register_cuda_shared_memory": (("region", b"aGFuZGxl", 0, 8), "CudaSharedMemoryRegister"),
    "unregister_cuda_shared_memory": ((), "CudaSharedMemoryUnregister"),
    "infer": (("echo", [given()]), echoes),
    "register_plugin": ((BasicAuth("user", "password"),), lambda result: result is None),
    "plugin": ((), lambda result: result is None),
    "close": ((), lambda result: result is None),
}
STREAMS = {"async_infer", "start_stream", "stop_stream", "async_stream_infer"}
ELSEWHERE = {
    blocking.InferenceServerClient: {"unregister_plugin", *STREAMS},
    aio.InferenceServerClient: {"unregister_plugin", "stream_infer"},
}


@pytest.mark.parametrize("client", ELSEWHERE)
def test_every_public_method_of_a_client_is_tested(client: type):
    public = {name for name in dir(client) if not name.startswith("_")}
    assert public == BOTH.keys() | ELSEWHERE[client]


def check(name: str, call: Callable[..., Any]) -> None:
    arguments, holds = BOTH[name]
    if callable(holds):
        assert holds(call(*arguments))
        return
    with pytest.raises(InferenceServerException) as raised:
        call(*arguments)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    assert raised.value.message() == f"this server does not offer {holds}"


@pytest.fixture
def client(echo: Served) -> Iterator[blocking.InferenceServerClient]:
    with blocking.InferenceServerClient(echo.address) as client:
        yield client


@pytest.mark.parametrize("name", BOTH)
def test_a_method_of_the_blocking_client(client: blocking.InferenceServerClient, name: str):
    check(name, getattr(client, name))


@pytest.mark.parametrize("name", BOTH)
def test_a_method_of_the_aio_client(echo: Served, name: str):
    async def call(*arguments: Any) -> Any:
        async with aio.InferenceServerClient(echo.address) as client:
            result = getattr(client, name)(*arguments)
            return await result if asyncio.iscoroutine(result) else result

    check(name, lambda *arguments: echo.run(call(*arguments)))


def test_a_plugin_is_registered_and_unregistered(client: blocking.InferenceServerClient):
    client.register_plugin(BasicAuth("user", "password"))
    assert client.is_server_live()
    client.unregister_plugin()
    assert client.plugin() is None


@pytest.mark.parametrize("model", ["echo", "unknown"])
def test_async_infer_answers_by_its_callback(client: blocking.InferenceServerClient, model: str):
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer(model, [given()], lambda result, error: answers.put((result, error)))
    result, error = answers.get()
    if model == "echo":
        assert error is None
        assert echoes(result)
    else:
        assert result is None
        assert error.message() == "no model is named unknown with version ''"


def test_a_stream_answers_every_request_in_order(client: blocking.InferenceServerClient):
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    arrays = [np.full((1, 3), index, np.float32) for index in range(100)]
    for index, array in enumerate(arrays):
        client.async_stream_infer("unknown" if index == 50 else "echo", [given(array)], request_id=str(index))
    client.stop_stream()
    received = [answers.get() for _ in arrays]
    assert received[50][1].message() == "no model is named unknown with version ''"
    for index, (result, error) in enumerate(received):
        if index != 50:
            assert error is None
            assert result.get_response().id == str(index)
            assert np.array_equal(result.as_numpy("x"), arrays[index])


def test_a_stream_of_the_aio_client(echo: Served):
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "echo", "inputs": [given()]}
        yield {"model_name": "unknown", "inputs": [given()]}
        yield {"model_name": "echo", "inputs": [given()]}

    async def call() -> list[tuple[Any, Any]]:
        async with aio.InferenceServerClient(echo.address) as client:
            return [answer async for answer in client.stream_infer(requests())]

    (first, _), (none, error), (last, _) = echo.run(call())
    assert echoes(first)
    assert none is None
    assert error.message() == "no model is named unknown with version ''"
    assert echoes(last)


def test_a_model_that_is_unknown_is_not_ready(client: blocking.InferenceServerClient):
    assert client.is_model_ready("unknown") is False
    assert client.is_model_ready("echo", "2") is False


def test_the_index_of_what_is_ready(client: blocking.InferenceServerClient):
    request = blocking.service_pb2.RepositoryIndexRequest(ready=True)
    assert [model.name for model in client._client_stub.RepositoryIndex(request).models] == ["echo"]


def test_parameters_of_a_load_reach_the_repository(echo: Served, client: blocking.InferenceServerClient):
    client.load_model("echo", config='{"name": "echo"}', files={"file:1/model.pt2": b"code"})
    client.unload_model("echo", unload_dependents=True)
    expected = {"config": '{"name": "echo"}', "file:1/model.pt2": b"code"}
    assert echo.repository.asked == [("load", ("echo", expected)), ("unload", "echo")]


def test_a_load_goes_on_when_its_client_goes_away(echo: Served, client: blocking.InferenceServerClient):
    echo.call(echo.repository.loading.clear)
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        client.load_model("echo", client_timeout=0.05)
    echo.call(echo.repository.loading.set)
    echo.until(lambda: echo.repository.asked == [("load", ("echo", {}))])


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("metadata", lambda client: client.get_model_metadata("ticker")),
        ("config", lambda client: client.get_model_config("ticker").config),
        ("statistics", lambda client: client.get_inference_statistics("ticker").model_stats[0]),
    ],
)
def test_what_the_engine_says_of_a_model_arrives(server: Served, what: str, ask: Callable[[Any], Any]):
    said: dict[str, Any] = server.call(getattr(server.model, what))
    if what == "metadata":  # for the rest of which the protocol's message has no field
        said = {key: said[key] for key in ("name", "versions", "platform", "inputs", "outputs")}
    with blocking.InferenceServerClient(server.address) as client:
        arrived = ask(client)
    assert arrived == ParseDict(said, type(arrived)())
