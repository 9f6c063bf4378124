"""Inferences over gRPC: what is sent arrives as it is, and what breaks the protocol is refused by name."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2

import exportkit
from tests.serve.engine import ticker
from tests.serve.protocol.messages import NUMPY, address, triton_inputs
from tests.serve.rpc.echo import STREAM, Served, serving
from tests.serve.rpc.hostile_messages import make, message, raw, survives, typed

SHAPES = [(), (3,), (0,), (2, 0, 3), (1, 1, 5), (64, 33)]


@pytest.fixture
def client(echo: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(echo.address) as client:
        yield client


def random_array(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    content = np.random.randint(0, 2 if dtype == np.bool_ else 256, size, np.uint8)
    return content.view(dtype).reshape(shape)  # NaN of every kind among them


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", [np.dtype(each) for each in NUMPY.values()], ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(echo: Served, client: triton.InferenceServerClient, dtype: np.dtype):
    arrays = {f"x{index}": random_array(dtype, shape) for index, shape in enumerate(SHAPES)}
    result = client.infer("echo", triton_inputs(triton, arrays), request_id="it")
    assert result.get_response().id == "it"
    for name, array in arrays.items():
        assert same(result.as_numpy(name), array)
    for tensor in echo.model.requests[-1].inputs:
        assert not tensor.data.nbytes or address(tensor.data) % 64 == 0


def test_only_the_outputs_that_are_asked_for_are_answered(client: triton.InferenceServerClient):
    inputs = triton_inputs(triton, {name: random_array(np.dtype("int8"), (2,)) for name in "abc"})
    outputs = [triton.InferRequestedOutput(name) for name in "ca"]
    response = client.infer("echo", inputs, outputs=outputs).get_response()
    assert (response.model_name, response.model_version) == ("echo", "1")
    assert {output.name for output in response.outputs} == {"a", "c"}
    assert len(response.raw_output_contents) == 2


def test_priority_timeout_and_deadline_reach_the_model(echo: Served, client: triton.InferenceServerClient):
    inputs = triton_inputs(triton, {"x": np.zeros(1, np.int8)})
    client.infer("echo", inputs, priority=1, timeout=2_500_000)
    client.infer("echo", inputs, client_timeout=100)
    client.infer("echo", inputs, client_timeout=100, timeout=2_500_000)
    client.infer("echo", inputs, client_timeout=100, timeout=1_000_000_000)
    plain, deadline, sooner, later = [request.timeout for request in echo.model.requests]
    assert (echo.model.requests[0].priority, echo.model.requests[1].priority) == (1, 0)
    assert plain == sooner == 2.5
    assert 2.5 < deadline < 102  # gRPC rounds a deadline up, to three digits
    assert 2.5 < later < 102


def test_the_size_of_the_tensors_is_reserved(echo: Served, client: triton.InferenceServerClient):
    client.infer("echo", triton_inputs(triton, {"x": np.zeros(100, np.int16), "y": np.zeros(7, np.int8)}))
    request = message(typed("z", "INT16", [3], int_contents=[1, 2, 3]))
    client._client_stub.ModelInfer(request)
    assert echo.model.reserved == [207, 6]


# --- typed contents ---------------------------------------------------------------------------------------------------


TYPED = {
    "BOOL": ("bool_contents", [True, False, True]),
    "UINT8": ("uint_contents", [0, 7, 255]),
    "UINT16": ("uint_contents", [0, 7, 65535]),
    "UINT32": ("uint_contents", [0, 7, (1 << 32) - 1]),
    "UINT64": ("uint64_contents", [0, 7, (1 << 64) - 1]),
    "INT8": ("int_contents", [-128, 0, 127]),
    "INT16": ("int_contents", [-32768, 0, 32767]),
    "INT32": ("int_contents", [-(1 << 31), 0, (1 << 31) - 1]),
    "INT64": ("int64_contents", [-(1 << 63), 0, (1 << 63) - 1]),
    "FP32": ("fp32_contents", [0.5, -1e30, 3.0]),
    "FP64": ("fp64_contents", [0.5, -1e300, 3.0]),
}


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_of_every_datatype(client: triton.InferenceServerClient, datatype: str):
    field, values = TYPED[datatype]
    response = client._client_stub.ModelInfer(message(typed("x", datatype, [3, 1], **{field: values})))
    expected = np.array(values, NUMPY[datatype])
    assert response.raw_output_contents[0] == expected.tobytes()
    assert list(response.outputs[0].shape) == [3, 1]


def test_typed_contents_without_elements(client: triton.InferenceServerClient):
    response = client._client_stub.ModelInfer(message(typed("x", "FP32", [0, 3]), raw("y", "INT8", [0])))
    assert list(response.raw_output_contents) == [b"", b""]


# --- refusals ---------------------------------------------------------------------------------------------------------


def with_parameter(name: str, **value: Any) -> Any:
    request = message(raw("x", "INT8", [1]), raw_input_contents=[b"1"])
    for kind, of_it in value.items():
        setattr(request.parameters[name], kind, of_it)
    return request


X = raw("x", "FP32", [2])
REFUSED = {
    "too few bytes": (message(X, raw_input_contents=[b"1234567"]), r"needs 8 bytes[.;] 7 were given"),
    "a content too few": (
        message(X, raw("y", "INT8", [0]), raw_input_contents=[bytes(8)]),
        r"1 `raw_input_contents` for 2 inputs",
    ),
    "a content too many": (message(X, raw_input_contents=[bytes(8)] * 2), r"2 `raw_input_contents` for 1 inputs"),
    "no contents": (message(X), "0 values"),
    "the same input twice": (message(X, X, raw_input_contents=[bytes(8)] * 2), "two inputs `x`"),
    "typed and raw": (
        message(typed("x", "FP32", [1], fp32_contents=[1]), raw_input_contents=[bytes(8)]),
        "has `contents`, and the request has `raw_input_contents`",
    ),
    "typed FP16": (message(typed("x", "FP16", [1], fp32_contents=[1])), "for which `contents` has no field"),
    "the field of another type": (message(typed("x", "INT64", [1], int_contents=[1])), "are in `int_contents`"),
    "INT8 beyond its range": (message(typed("x", "INT8", [1], int_contents=[128])), "-128 to 127"),
    "too few values": (message(typed("x", "INT8", [2], int_contents=[1])), "has 1 values"),
    "a timeout of text": (with_parameter("timeout", string_param="1"), "`timeout`"),
    "a priority without a value": (with_parameter("priority", int64_param=1, bool_param=True), "`priority`"),
    "a reserved parameter": (with_parameter("triton_x", int64_param=1), "reserved"),
}
NOT_OFFERED = {
    "BYTES": (message(raw("x", "BYTES", [1]), raw_input_contents=[b"\1\0\0\0a"]), "BYTES"),
    "a classification": (
        message(
            raw("x", "INT8", [1]),
            raw_input_contents=[b"1"],
            outputs=[
                service_pb2.ModelInferRequest.InferRequestedOutputTensor(
                    name="x", parameters={"classification": service_pb2.InferParameter(int64_param=3)}
                )
            ],
        ),
        "classification",
    ),
    "shared memory": (
        message(raw("x", "INT8", [1], shared_memory_region="r", shared_memory_byte_size=1)),
        "shared memory, which this server does not offer",
    ),
}


def refusal(client: triton.InferenceServerClient, request: Any) -> Any:
    with pytest.raises(Exception, match="StatusCode") as raised:
        client._client_stub.ModelInfer(request)
    return raised.value


MANY = {  # of which a short message could make many objects
    "fields": (service_pb2.ModelInferRequest(outputs=[{"name": "x"}] * 5000), "more than 4096 fields"),
    "inputs": (message(*[raw("x", "INT8", [0])] * 1025), "has 1025 inputs"),
    "parameters": (message(raw("x", "INT8", [0], **{f"p{i}": 1 for i in range(300)})), "300 parameters in one place"),
    "bytes": (message(raw("x" * (17 << 20), "INT8", [0])), "more than 16777216 bytes beside `raw_input_contents`"),
}


@pytest.mark.parametrize("name", [*REFUSED, *NOT_OFFERED, *MANY])
def test_what_breaks_the_protocol_or_is_not_offered_is_refused(
    echo: Served, client: triton.InferenceServerClient, name: str
):
    request, expected = {**REFUSED, **NOT_OFFERED, **MANY}[name]
    error = refusal(client, request)
    assert error.code().name == ("UNIMPLEMENTED" if name in NOT_OFFERED else "INVALID_ARGUMENT")
    assert re.search(expected, error.details())
    assert echo.model.requests == []


def test_elements_are_not_read_before_they_have_room(echo: Served, client: triton.InferenceServerClient):
    echo.model.room = 1 << 40
    error = refusal(client, message(typed("x", "FP64", [1 << 40], fp64_contents=[1])))
    assert error.details() == "as many bytes wait as may"


def test_hostile_requests_raise_nothing_but_what_a_client_is_told():
    chance = random.Random(1)
    taken = sum(survives(make(chance)) for _ in range(5000))
    assert 500 < taken < 4500


# --- what the engine serves -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ticking(loop: asyncio.AbstractEventLoop, ticker_package: Path) -> Iterator[Served]:
    """A server of a model with state, in whose queue few rows have room."""
    with serving(loop, ticker_package, max_delay=0.02, max_queued_rows=8) as opened:
        yield opened


def test_steps_of_a_stream_wait_and_run_in_order_however_many_rows_do(ticking: Served, ticker_package: Path):
    """Two sequences in turns, of more steps than a stream has requests that are not answered."""
    count, sent = 300, []
    for number in range(count):
        inputs = ticker.inputs(number, 5)
        which = {"sequence_id": {"int64_param": 1 + number % 2}, "sequence_start": {"bool_param": number < 2}}
        request = message(*(raw(name, "FP32", list(each.shape)) for name, each in inputs.items()), parameters=which)
        request.model_name = "ticker"
        request.raw_input_contents.extend(each.numpy().tobytes() for each in inputs.values())
        sent.append(request.SerializeToString())
    with grpc.insecure_channel(ticking.address) as channel:
        received = list(map(service_pb2.ModelStreamInferResponse.FromString, channel.stream_stream(STREAM)(iter(sent))))
    assert [answer.error_message for answer in received] == [""] * count
    with exportkit.load(ticker_package) as model:
        for first in (0, 1):
            with model.session(batch=5) as session:
                for number in range(first, count, 2):
                    expected = session(*ticker.inputs(number, 5).values()).numpy().tobytes()
                    assert received[number].infer_response.raw_output_contents[0] == expected


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("metadata", lambda client: client.get_model_metadata("ticker")),
        ("config", lambda client: client.get_model_config("ticker").config),
        ("statistics", lambda client: client.get_inference_statistics("ticker").model_stats[0]),
    ],
)
def test_what_the_engine_says_of_a_model_arrives(ticking: Served, what: str, ask: Callable[[Any], Any]) -> None:
    said: dict[str, Any] = ticking.call(getattr(ticking.model, what))
    if what == "metadata":  # for the rest of which the protocol's message has no field
        said = {key: said[key] for key in ("name", "versions", "platform", "inputs", "outputs")}
    with triton.InferenceServerClient(ticking.address) as client:
        arrived = ask(client)
    assert arrived == ParseDict(said, type(arrived)())
