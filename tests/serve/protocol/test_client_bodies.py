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
from exportkit.serve.protocol.http_request import BodyRules, ParsedBody, body_buffer, parse_body
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


_BINARY = st.dictionaries(_NAMES, _tensor(tuple(NUMPY)), max_size=4)
_JSON = st.dictionaries(_NAMES.map("json {}".format), _tensor(AS_JSON), max_size=3)


def _received(sent: tuple[bytes, int | None]) -> ParsedBody:
    body, header_length = sent
    buffer = body_buffer(len(body), header_length)
    buffer[:] = body
    return parse_body(buffer, header_length, BodyRules([], [], batched=False, max_bytes=1 << 20))


def _inputs(tensors: dict[str, tuple[str, np.ndarray]], binary: bool) -> list[client.InferInput]:
    return triton_inputs(client, {name: array for name, (_, array) in tensors.items()}, binary_data=binary)


def _finite(tensors: dict[str, tuple[str, np.ndarray]]) -> dict[str, tuple[str, np.ndarray]]:
    """Returns the tensors without NaN and infinity."""
    return {
        name: (datatype, np.asarray(np.nan_to_num(array, posinf=0, neginf=0)))
        for name, (datatype, array) in tensors.items()
    }


def _assert_same(received: ParsedBody, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    assert [tensor.name for tensor in received.request.inputs] == list(tensors)
    for tensor, (datatype, array) in zip(received.request.inputs, tensors.values(), strict=True):
        assert (tensor.datatype, tensor.shape) == (datatype, array.shape)
        assert tensor.data == array.tobytes()
        assert not tensor.data.nbytes or address(tensor.data) % 64 == 0


@given(_BINARY, _JSON, st.text(max_size=5), st.integers(0, 9), st.none() | st.integers(1, 10**9))
@settings(max_examples=examples(300))
def test_requests_arrive_bit_for_bit_and_aligned_but_for_what_json_cannot_hold(
    binary: dict[str, tuple[str, np.ndarray]],
    values: dict[str, tuple[str, np.ndarray]],
    id: str,
    priority: int,
    timeout: int | None,
) -> None:
    """Inputs in JSON and in binary data may be mixed."""

    def received(values: dict[str, tuple[str, np.ndarray]]) -> ParsedBody:
        inputs = _inputs(values, False) + _inputs(binary, True)
        sent = client.InferenceServerClient.generate_request_body(
            inputs, request_id=id, priority=priority, timeout=timeout
        )
        assert (sent[1] is None) == (not binary)
        return _received(sent)

    if not all(np.isfinite(array).all() for _, array in values.values()):
        with pytest.raises(BadRequestError, match="neither NaN nor infinity"):
            received(values)
    values = _finite(values)
    found = received(values)
    _assert_same(found, {**values, **binary})
    assert (found.request.id, found.request.priority) == (id, priority)
    assert found.request.timeout == (None if timeout is None else pytest.approx(timeout / 1e6))
    assert found.request.outputs is None
    assert found.forms.of("any") == OutputForm(binary=True)  # the client asks for it where no outputs are named


@given(_BINARY, _JSON, st.text(max_size=5))
@settings(max_examples=examples(200))
def test_the_client_reads_answers_bit_for_bit(
    binary: dict[str, tuple[str, np.ndarray]], values: dict[str, tuple[str, np.ndarray]], id: str
) -> None:
    values = _finite(values)
    forms = OutputForms(OutputForm(binary=True), dict.fromkeys(values, OutputForm(binary=False)))
    header_length, parts = encode_answer(answer_of({**values, **binary}, id), forms)
    assert header_length == (len(parts[0]) if binary else None)
    result = client.InferenceServerClient.parse_response_body(b"".join(parts), header_length=header_length)
    for name, (datatype, array) in {**values, **binary}.items():
        read = result.as_numpy(name)
        assert (result.get_output(name)["datatype"], read.dtype) == (datatype, array.dtype)
        assert (read.shape, read.tobytes()) == (array.shape, array.tobytes())
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response.get("id", "")) == ("model", "1", id)
