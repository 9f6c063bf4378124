"""tritonclient writes requests and reads answers: it is the other side of every round trip here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as client
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from exportkit.serve.http.infer_endpoint import encode_answer
from exportkit.serve.protocol.http_request import BodyRules, ParsedBody, body_buffer, header_length_of, parse_body
from exportkit.serve.protocol.parameters import OutputForm, OutputForms
from exportkit.serve.statuses import BadRequestError
from tests.drawn import examples
from tests.serve.protocol.messages import AS_JSON, NUMPY, address, answer_of, triton_inputs

_SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def _tensor(draw: Any, datatypes: tuple[str, ...]) -> tuple[str, np.ndarray]:
    """A datatype and an array of it with any bits; BOOL has two values."""
    datatype = draw(st.sampled_from(datatypes))
    dtype = np.dtype(NUMPY[datatype])
    shape = draw(_SHAPES)
    if datatype == "BOOL":
        return datatype, draw(arrays.arrays(np.bool_, shape))
    bits = draw(arrays.arrays(np.dtype(f"u{dtype.itemsize}"), shape))
    return datatype, np.asarray(bits).view(dtype)


_BINARY = st.dictionaries(_NAMES, _tensor(tuple(NUMPY)), min_size=1, max_size=4)
_JSON = st.dictionaries(_NAMES, _tensor(AS_JSON), min_size=1, max_size=3)


def _received(sent: tuple[bytes, int | None], **options: Any) -> ParsedBody:
    body, header_length = sent
    number = header_length_of(None if header_length is None else str(header_length))
    buffer = body_buffer(len(body), number)
    buffer[:] = body
    return parse_body(buffer, number, BodyRules([], [], batched=False, max_bytes=1 << 20), **options)


def _inputs(tensors: dict[str, tuple[str, np.ndarray]], binary: bool) -> list[client.InferInput]:
    return triton_inputs(client, {name: array for name, (_, array) in tensors.items()}, binary_data=binary)


def _finite(tensors: dict[str, tuple[str, np.ndarray]]) -> dict[str, tuple[str, np.ndarray]]:
    """Returns the tensors, under other names and without NaN and infinity."""
    return {
        f"json {name}": (datatype, np.asarray(np.nan_to_num(array, posinf=0, neginf=0)))
        for name, (datatype, array) in tensors.items()
    }


def _assert_same(received: ParsedBody, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    assert [tensor.name for tensor in received.request.inputs] == list(tensors)
    for tensor, (datatype, array) in zip(received.request.inputs, tensors.values(), strict=True):
        assert (tensor.datatype, tensor.shape) == (datatype, array.shape)
        assert tensor.data == array.tobytes()
        assert not tensor.data.nbytes or address(tensor.data) % 64 == 0


@given(_BINARY, st.text(max_size=5), st.integers(0, 9), st.none() | st.integers(1, 10**9))
def test_binary_requests_arrive_bit_for_bit_and_aligned(
    tensors: dict[str, tuple[str, np.ndarray]], id: str, priority: int, timeout: int | None
) -> None:
    sent = client.InferenceServerClient.generate_request_body(
        _inputs(tensors, True), request_id=id, priority=priority, timeout=timeout
    )
    received = _received(sent)
    _assert_same(received, tensors)
    assert (received.request.id, received.request.priority) == (id, priority)
    assert received.request.timeout == (None if timeout is None else pytest.approx(timeout / 1e6))
    assert received.request.outputs is None
    assert received.forms.of("any") == OutputForm(binary=True)  # the client asks for it where no outputs are named


@given(_JSON)
def test_json_requests_arrive_bit_for_bit_but_for_what_json_cannot_hold(
    tensors: dict[str, tuple[str, np.ndarray]],
) -> None:
    sent = client.InferenceServerClient.generate_request_body(_inputs(tensors, False))
    assert sent[1] is None
    if all(np.isfinite(array).all() for _, array in tensors.values()):
        _assert_same(_received(sent), tensors)
    else:
        with pytest.raises(BadRequestError, match="neither NaN nor infinity"):
            _received(sent)


@given(_BINARY, _JSON)
def test_inputs_in_json_and_in_binary_data_may_be_mixed(
    binary: dict[str, tuple[str, np.ndarray]], values: dict[str, tuple[str, np.ndarray]]
) -> None:
    values = _finite(values)
    inputs = _inputs(values, False) + _inputs(binary, True)
    _assert_same(_received(client.InferenceServerClient.generate_request_body(inputs)), {**values, **binary})


@given(_BINARY, _JSON, st.text(max_size=5))
@settings(max_examples=examples(200))
def test_the_client_reads_answers_bit_for_bit(
    binary: dict[str, tuple[str, np.ndarray]], values: dict[str, tuple[str, np.ndarray]], id: str
) -> None:
    values = _finite(values)
    forms = OutputForms(OutputForm(binary=True), dict.fromkeys(values, OutputForm(binary=False)))
    header_length, parts = encode_answer(answer_of({**values, **binary}, id), forms)
    assert header_length == len(parts[0])
    result = client.InferenceServerClient.parse_response_body(b"".join(parts), header_length=header_length)
    for name, (datatype, array) in {**values, **binary}.items():
        read = result.as_numpy(name)
        assert (result.get_output(name)["datatype"], read.dtype) == (datatype, array.dtype)
        assert (read.shape, read.tobytes()) == (array.shape, array.tobytes())
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response.get("id", "")) == ("model", "1", id)


@given(_JSON)
def test_an_answer_in_json_alone_has_no_header_length(values: dict[str, tuple[str, np.ndarray]]) -> None:
    values = _finite(values)
    header_length, parts = encode_answer(answer_of(values), OutputForms(OutputForm(binary=False), {}))
    assert (header_length, len(parts)) == (None, 1)
    result = client.InferenceServerClient.parse_response_body(bytes(parts[0]))
    for name, (_, array) in values.items():
        assert (result.as_numpy(name).shape, result.as_numpy(name).tobytes()) == (array.shape, array.tobytes())
