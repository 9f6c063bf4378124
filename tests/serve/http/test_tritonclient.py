"""Every public method of tritonclient's HTTP clients works, or raises InferenceServerException with our words."""

from __future__ import annotations

import asyncio
import http.client
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from tests.serve.page.in_thread import Site

X = np.array([1.5, -2.0, 3.25], np.float32)


class Case(NamedTuple):
    """A call, and what it returns: a value, a test of the value, or the status and the words of the exception."""

    call: Callable[[Any], Any]
    expected: Any


class Refused(NamedTuple):
    status: str
    words: str


def x() -> list[Any]:
    tensor = tritonclient.http.InferInput("x", list(X.shape), "FP32")
    return [tensor.set_data_from_numpy(X)]


def is_x(result: Any) -> bool:
    return bool((result.as_numpy("x") == X).all())


NOT_SERVED = Refused("404", "no model absent")
NO_TRACES = Refused("501", "trace settings cannot be read or changed")
NO_LOGGING = Refused("501", "log settings cannot be read or changed")
NO_MEMORY = Refused("501", "this server does not offer shared memory")

CALLS: dict[str, list[Case]] = {
    "is_server_live": [Case(lambda c: c.is_server_live(), True)],
    "is_server_ready": [Case(lambda c: c.is_server_ready(query_params={"verbose": "a b"}), True)],
    "is_model_ready": [
        Case(lambda c: c.is_model_ready("echo"), True),
        Case(lambda c: c.is_model_ready("broken down", "1"), True),
        Case(lambda c: c.is_model_ready("echo", "2"), False),
        Case(lambda c: c.is_model_ready("absent"), False),
    ],
    "get_server_metadata": [
        Case(lambda c: c.get_server_metadata(), lambda found: "binary_tensor_data" in found["extensions"])
    ],
    "get_model_metadata": [
        Case(lambda c: c.get_model_metadata("echo"), lambda found: found["name"] == "echo"),
        Case(lambda c: c.get_model_metadata("broken down", "1"), lambda found: found["name"] == "broken down"),
        Case(lambda c: c.get_model_metadata("absent"), NOT_SERVED),
        Case(lambda c: c.get_model_metadata("a/b"), Refused("404", "there is nothing at GET /v2/models/a/b")),
        Case(lambda c: c.get_model_metadata("echo", "9"), Refused("404", "no model echo 9")),
    ],
    "get_model_config": [
        Case(lambda c: c.get_model_config("echo"), {"name": "echo", "max_batch_size": 0}),
        Case(lambda c: c.get_model_config("echo", "1"), {"name": "echo", "max_batch_size": 0}),
        Case(lambda c: c.get_model_config("absent", "1"), Refused("404", "no model absent 1")),
    ],
    "get_inference_statistics": [
        Case(lambda c: c.get_inference_statistics(), lambda found: len(found["model_stats"]) == 3),
        Case(lambda c: c.get_inference_statistics("echo"), lambda f: [e["name"] for e in f["model_stats"]] == ["echo"]),
        Case(lambda c: c.get_inference_statistics("echo", "1"), lambda found: len(found["model_stats"]) == 1),
        Case(lambda c: c.get_inference_statistics("absent"), NOT_SERVED),
    ],
    "get_model_repository_index": [
        Case(
            lambda c: c.get_model_repository_index(),
            lambda found: (
                {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "the file is truncated"} in found
            ),
        )
    ],
    "load_model": [
        Case(lambda c: c.load_model("echo"), None),
        Case(lambda c: c.load_model("broken"), Refused("500", "the file is truncated")),
        Case(
            lambda c: c.load_model("echo", config="{}", files={"file:1/model.pt2": b"code"}),
            Refused("400", "a model is not loaded from a request"),
        ),
    ],
    "unload_model": [
        Case(lambda c: c.unload_model("echo", unload_dependents=True), None),
        Case(lambda c: c.unload_model("absent"), NOT_SERVED),
    ],
    "update_trace_settings": [
        Case(lambda c: c.update_trace_settings(settings={"trace_level": "OFF"}), NO_TRACES),
        Case(lambda c: c.update_trace_settings("echo", {"trace_level": "OFF"}), NO_TRACES),
    ],
    "get_trace_settings": [
        Case(lambda c: c.get_trace_settings(), NO_TRACES),
        Case(lambda c: c.get_trace_settings("echo"), NO_TRACES),
    ],
    "update_log_settings": [Case(lambda c: c.update_log_settings({"log_info": False}), NO_LOGGING)],
    "get_log_settings": [Case(lambda c: c.get_log_settings(), NO_LOGGING)],
    "get_system_shared_memory_status": [
        Case(lambda c: c.get_system_shared_memory_status(), NO_MEMORY),
        Case(lambda c: c.get_system_shared_memory_status("region"), NO_MEMORY),
    ],
    "register_system_shared_memory": [Case(lambda c: c.register_system_shared_memory("r", "/r", 4), NO_MEMORY)],
    "unregister_system_shared_memory": [
        Case(lambda c: c.unregister_system_shared_memory(), NO_MEMORY),
        Case(lambda c: c.unregister_system_shared_memory("r"), NO_MEMORY),
    ],
    "get_cuda_shared_memory_status": [
        Case(lambda c: c.get_cuda_shared_memory_status(), NO_MEMORY),
        Case(lambda c: c.get_cuda_shared_memory_status("region"), NO_MEMORY),
    ],
    "register_cuda_shared_memory": [Case(lambda c: c.register_cuda_shared_memory("r", b"handle", 0, 4), NO_MEMORY)],
    "unregister_cuda_shared_memory": [
        Case(lambda c: c.unregister_cuda_shared_memory(), NO_MEMORY),
        Case(lambda c: c.unregister_cuda_shared_memory("r"), NO_MEMORY),
    ],
    "infer": [
        Case(lambda c: c.infer("echo", x()), is_x),
        Case(lambda c: c.infer("echo", x(), "1", request_id="7", query_params={"a": 1}), is_x),
        Case(lambda c: c.infer("echo", x(), priority=1, timeout=10**7, parameters={"mine": "ours"}), is_x),
        Case(lambda c: c.infer("echo", x(), request_id="seven"), lambda r: r.get_response()["id"] == "seven"),
        Case(lambda c: c.infer("echo", x(), request_compression_algorithm="gzip"), is_x),
        Case(lambda c: c.infer("echo", x(), request_compression_algorithm="deflate"), is_x),
        Case(lambda c: c.infer("echo", x(), response_compression_algorithm="gzip"), is_x),
        Case(lambda c: c.infer("echo", x(), response_compression_algorithm="deflate"), is_x),
        Case(lambda c: c.infer("absent", x()), NOT_SERVED),
        Case(lambda c: c.infer("broken down", x()), Refused("500", "the server failed (")),
        Case(lambda c: c.infer("echo", x(), sequence_id=3, sequence_start=True), is_x),
        Case(
            lambda c: c.infer("echo", x(), outputs=[tritonclient.http.InferRequestedOutput("x", class_count=2)]),
            Refused("501", "`classification`"),
        ),
    ],
    "plugin": [Case(lambda c: c.plugin(), None)],
    "register_plugin": [Case(lambda c: c.register_plugin(BasicAuth("user", "password")), None)],
    "unregister_plugin": [Case(lambda c: (c.register_plugin(BasicAuth("u", "p")), c.unregister_plugin())[1], None)],
    "close": [Case(lambda c: c.close(), None)],
}
OF_HTTP = {
    **CALLS,
    "async_infer": [
        Case(lambda c: c.async_infer("echo", x()).get_result(), is_x),
        Case(lambda c: c.async_infer("absent", x()).get_result(), NOT_SERVED),
    ],
}
BODIES = {"generate_request_body", "parse_response_body"}  # they meet no server: see the test below


def public(client: type) -> set[str]:
    return {name for name in dir(client) if not name.startswith("_")}


def test_the_tables_have_every_public_method() -> None:
    """A new tritonclient that can more makes this fail."""
    assert public(tritonclient.http.InferenceServerClient) == OF_HTTP.keys() | BODIES
    assert public(tritonclient.http.aio.InferenceServerClient) == CALLS.keys() | BODIES


def check(outcome: Callable[[], Any], expected: Any) -> None:
    if isinstance(expected, Refused):
        with pytest.raises(InferenceServerException) as raised:
            outcome()
        assert raised.value.status() == expected.status
        assert expected.words in raised.value.message()
        assert raised.value.debug_details() is None, "the client could not decode our answer"
    else:
        found = outcome()
        assert expected(found) if callable(expected) else found == expected


@pytest.mark.parametrize("name", OF_HTTP)
def test_http_client(site: Site, name: str) -> None:
    for case in OF_HTTP[name]:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{site.port}") as client:
            check(lambda: case.call(client), case.expected)  # noqa: B023  (it is called at once)


@pytest.mark.parametrize("name", CALLS)
def test_aio_client(site: Site, name: str) -> None:
    async def outcome(case: Case) -> Any:
        async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{site.port}") as client:
            found = case.call(client)
            return await found if inspect.isawaitable(found) else found

    for case in CALLS[name]:
        check(lambda: asyncio.run(outcome(case)), case.expected)  # noqa: B023  (it is called at once)


@pytest.mark.parametrize(
    "client", [tritonclient.http.InferenceServerClient, tritonclient.http.aio.InferenceServerClient]
)
def test_bodies_that_other_http_clients_send(site: Site, client: Any) -> None:
    body, json_length = client.generate_request_body(x())
    connection = http.client.HTTPConnection("127.0.0.1", site.port)
    headers = {"Inference-Header-Content-Length": str(json_length)}
    connection.request("POST", "/v2/models/echo/infer", body, headers)
    answer = connection.getresponse()
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert is_x(client.parse_response_body(answer.read(), header_length=length))
    connection.close()
