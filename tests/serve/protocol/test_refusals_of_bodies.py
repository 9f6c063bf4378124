from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.package.dtypes import DTYPES
from exportkit.serve.http.infer_endpoint import encode_answer
from exportkit.serve.protocol.datatypes import datatype_of, dtype_of, item_size
from exportkit.serve.protocol.http_request import body_buffer, header_length_of
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.protocol.parameters import OutputForm, OutputForms, scheduling
from exportkit.serve.protocol.tensors import TensorSpec
from exportkit.serve.statuses import BadRequestError, NotOfferedError, TooLargeError
from tests.serve.protocol.messages import AS_JSON, METADATA, NUMPY, answer_of, described, parsed

_DATA = {"data": [1, 2, 3]}


# --- the length of the JSON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["-1", "1e30", "0x10", "+5", " 5", "5 ", "", "٣", "5,5", "1_0", "9" * 19, "9" * 10**6]
)
def test_a_header_length_that_is_no_number_of_bytes_is_refused(value: str) -> None:
    with pytest.raises(
        BadRequestError, match=r"the header Inference-Header-Content-Length is `.*not a number of bytes"
    ) as caught:
        header_length_of(value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("length", ["3", "99999999999", "9" * 18])
def test_a_header_longer_than_the_body_is_refused_before_memory_is_taken(length: str) -> None:
    with pytest.raises(BadRequestError, match=f"Inference-Header-Content-Length is {length}, and the body has 2 bytes"):
        parsed(b"{}", length=length)


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_a_request_without_json_needs_a_model_with_one_input(names: list[str]) -> None:
    metadata = {"inputs": [{"name": name, "datatype": "FP32", "shape": [1]} for name in names], "outputs": []}
    with pytest.raises(BadRequestError, match=f"models of one input; this has {len(names)}: {', '.join(names)}"):
        parsed(b"", bytes(4), "0", metadata=metadata)


@pytest.mark.parametrize(
    ("shape", "batched", "size", "expected"),
    [
        ([2, 3], False, 24, (2, 3)),
        ([-1, 3], False, 24, (2, 3)),
        ([-1, 3], True, 24, (2, 3)),
        ([-1, 3], True, 0, (0, 3)),
        ([-1, -1, 3], True, 24, (1, 2, 3)),
        ([-1, -1, 3], False, 24, "at most one size varies"),
        ([-1, -1, -1], True, 24, "at most one size varies"),
        ([3, -1, -1], True, 24, "at most one size varies"),
        ([-1, 3], False, 25, "needs 24 bytes; 25 were given"),
        ([2, 3], False, 23, "needs 24 bytes; 23 were given"),
        ([-1, 0], False, 4, "needs 0 bytes; 4 were given"),
        ([], False, 4, ()),
    ],
)
def test_a_request_without_json_has_the_shape_that_its_size_says(
    shape: list[int], batched: bool, size: int, expected: Any
) -> None:
    metadata = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape}], "outputs": []}
    if isinstance(expected, str):
        with pytest.raises(BadRequestError, match=expected):
            parsed(b"", bytes(size), "0", metadata=metadata, batched=batched)
    else:
        received = parsed(b"", bytes(size), "0", metadata=metadata, batched=batched)
        (tensor,) = received.request.inputs
        assert (tensor.name, tensor.shape, tensor.data.nbytes) == ("x", expected, size)
        assert received.forms.of("y") == OutputForm(binary=True)


# --- what is refused --------------------------------------------------------------------------------------------------


def _sized(size: object, **more: Any) -> dict[str, Any]:
    return {"inputs": [described(parameters={"binary_data_size": size}, **more)]}


@pytest.mark.parametrize(
    ("header", "binary", "words"),
    [
        (_sized(12), bytes(13), "1 bytes longer than its inputs"),
        (_sized(12), bytes(11), "`x` has 12 bytes of binary data; 11 are left"),
        (_sized(12), b"", "no header Inference-Header-Content-Length"),
        (_sized(8), bytes(8), r"`x` \(FP32, shape \[1, 3\]\) needs 12 bytes; 8 were given"),
        (_sized(1 << 63), bytes(12), "needs 12 bytes; 9223372036854775808 were given"),
        (_sized(-1), bytes(12), "`binary_data_size` of the input `x` is not a whole number"),
        (_sized("12"), bytes(12), "`binary_data_size` of the input `x` is not a whole number"),
        (_sized(12, data=[1, 2, 3]), bytes(12), "its data in two places"),
        (_sized(3, datatype="BOOL"), b"\0\1\2", "`x` is BOOL and has a byte that is neither 0 nor 1"),
        ({"inputs": [described(**_DATA)]}, bytes(1), "1 bytes longer than its inputs"),
    ],
)
def test_binary_data_that_does_not_add_up_is_refused(header: object, binary: bytes, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        parsed(header, binary)


def _request(parameters: object = None, outputs: object = None, **changes: Any) -> dict[str, Any]:
    """A request, with changes of its input."""
    return {"inputs": [described(**_DATA) | changes], "parameters": parameters, "outputs": outputs}


_TWICE = "the key `{}` is there twice .in the {}"
_X = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32"'


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `inputs`"),
        (b'{"inputs": [], "batch": 1}', "unknown field `batch`"),
        (_X + b', "dtype": 1}]}', "unknown field `dtype`"),
        (_request(outputs=[{"name": "y", "shape": [1]}]), "unknown field `shape`"),
        (_X.replace(b"x", b"\xff") + b"}]}", "(?i)utf-8"),
        (_X.replace(b"x", b"\\ud800") + b"}]}", "cannot be read"),
        (b'{"inputs": [], "id": NaN}', "neither NaN nor infinity"),
        (b'{"inputs": [], "\\u0069nputs": []}', _TWICE.format("inputs", "request")),
        (b'{"inputs": [], "parameters": {"a": 1, "a": 1}}', _TWICE.format("a", "parameters of the request")),
        (_X + b', "name": "y"}]}', _TWICE.format("name", "inputs")),
        (b'{"inputs": [], "outputs": [{"name": "y"}, {"name": "z", "name": "z"}]}', _TWICE.format("name", "outputs")),
        (
            b'{"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": true, "binary_data": false}}]}',
            _TWICE.format("binary_data", "parameters of the output `y`"),
        ),
        ({"inputs": [described(**_DATA)] * 2}, "two inputs `x`"),
        (_request(name=""), "an input has an empty name"),
        (_request(outputs=[{"name": "y"}] * 2), "two outputs `y`"),
        # Parameters that mean something.
        (_request({"priority": -1}), "`priority` of the request is not a whole number"),
        (_request({"priority": 1 << 64}), "`priority` of the request is not a whole number"),
        (_request({"priority": None}), "`priority` of the request is not a whole number"),
        (_request({"timeout": 1.5}), "`timeout` of the request is not a whole number"),
        (_request({"timeout": True}), "`timeout` of the request is not a whole number"),
        (_request({"binary_data_output": 1}), "`binary_data_output` of the request is neither true nor false"),
        (_request({"triton_final_response": True}), "`triton_final_response` has a reserved name"),
        (_request({"headers": {}}), "`headers` has a reserved name"),
        (_request({"sequence_id": -1}), "`sequence_id` of the request is not a whole number"),
        (_request({"sequence_id": "x" * 129}), "`sequence_id` has 129 characters; 128 are allowed"),
        (_request({"sequence_id": 1, "sequence_end": 1}), "`sequence_end` of the request is neither true nor"),
        (_request({"sequence_start": True}), "has no `sequence_id`"),
        (_request({"sequence_id": 0, "sequence_end": True}), "has no `sequence_id`"),
        (
            _request(outputs=[{"name": "y", "parameters": {"binary_data": 1}}]),
            "`binary_data` of the output `y` is neither true nor false",
        ),
        (
            _request(outputs=[{"name": "y", "parameters": {"classification": "x"}}]),
            "`classification` of the output `y` is not a whole number",
        ),
        # Shapes that no tensor has.
        (_request(shape=[-1]), r"shape \[-1\]; sizes are not negative"),
        (_request(shape=[2**62, 2**62]), "no memory can hold"),
        (_request(shape=[2**63, 0]), "no memory can hold"),
        (_request(shape=[2**62]), "no memory can hold"),
        (_request(shape=[10**300, 0]), r"shape \[\.\.\., 0\], which no memory can hold"),
        (_request(shape=[1] * 33), "has 33 sizes; at most 32"),
        (_request(shape=[True]), "Expected `int`, got `bool`"),
        # Lists that are not the shape.
        (_request(data=None), "`x` has no data"),
        (_request(shape=[1, 3], data=[[[1, 2, 3]]]), "nested 3 deep, and its shape has 2 sizes"),
        (_request(shape=[3], data=[[1, 2, 3]]), "nested 2 deep, and its shape has 1 sizes"),
        (_request(shape=[3, 1], data=[[1, 2, 3]]), r"nested as \[1, 3\]; its shape is \[3, 1\]"),
        (_request(shape=[2, 2], data=[[1, 2], [3]]), "nested unevenly"),
        (_request(shape=[2, 2], data=[[1, 2], 3]), "Expected `array`, got `int`"),
        (_request(shape=[3], data=[1, [2], 3]), "Expected `float`, got `array`"),
        (_request(shape=[3], data=[1, 2]), r"`x` has 2 values; its shape \[3\] needs 3"),
        (_request(shape=[], data=[1, 2]), r"`x` has 2 values; its shape \[\] needs 1"),
        (_request(shape=[0], data=[1]), r"`x` has 1 values; its shape \[0\] needs 0"),
        (_request(shape=[1], data=1), "Expected `array`, got `int`"),
    ],
)
def test_json_that_is_no_request_is_refused(header: object, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        parsed(header)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"classification": 3}, "`y` is asked for with `classification`"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 1}, "`y` is to lie in shared memory"),
    ],
)
def test_what_is_not_offered_is_said(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(NotOfferedError, match=words):
        parsed(_request(outputs=[{"name": "y", "parameters": parameters}]))


@pytest.mark.parametrize(
    "place", ['{"inputs": %s', '{"inputs": [{"data": %s', '{"parameters": {"a": %s', '{"a": %s', "%s"]
)
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused_and_ends_nothing(place: str, opening: str) -> None:
    with pytest.raises(BadRequestError, match="cannot be read"):
        parsed((place % (opening * 200_000)).encode())


def test_deep_nesting_of_data_is_refused() -> None:
    depth = sys.getrecursionlimit() // 2
    header = json.dumps({"inputs": [described(data=0)]}).replace('"data": 0', '"data": ' + "[" * depth + "]" * depth)
    with pytest.raises(BadRequestError, match=f"`x` is nested {depth} deep, and its shape has 2 sizes"):
        parsed(header.encode())


def test_a_request_has_no_more_inputs_and_outputs_than_a_model_can_have() -> None:
    many = [described(f"x{number}", shape=[0], data=[]) for number in range(1025)]
    assert len(parsed({"inputs": many[1:]}).request.inputs) == 1024
    with pytest.raises(BadRequestError, match="has 1025 inputs; at most 1024 are allowed"):
        parsed({"inputs": many})
    with pytest.raises(BadRequestError, match="has 1025 outputs; at most 1024 are allowed"):
        parsed({"inputs": [], "outputs": [{"name": f"y{number}"} for number in range(1025)]})


@pytest.mark.parametrize("place", [{"parameters": {"p": "p" * (1 << 20)}}, {"outputs": [{"name": "p" * (1 << 20)}]}])
def test_parameters_and_outputs_that_are_very_long_are_refused(place: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="bytes; at most 1048576 are allowed"):
        parsed({"inputs": [], **place})


@pytest.mark.parametrize("data", [{"parameters": {"binary_data_size": 400}}, {"data": [0] * 100}])
def test_inputs_have_no_more_bytes_than_the_model_takes(data: dict[str, Any]) -> None:
    binary = bytes(400) if "parameters" in data else b""
    header = {"inputs": [described(shape=[100], **data)]}
    parsed(header, binary, max_bytes=400)
    with pytest.raises(TooLargeError, match="the inputs have more than 399 bytes"):
        parsed(header, binary, max_bytes=399)


def test_null_stands_for_an_optional_member_that_is_not_there() -> None:
    """Clients made with pydantic send every optional member; KServe's sends the model's name too."""
    header = {"id": None, "parameters": None, "outputs": None, "model_name": "m", "model_version": None}
    received = parsed({**header, "inputs": [described(parameters=None, **_DATA)]}).request
    assert (received.id, received.outputs) == ("", None)


def test_long_names_are_cut_in_messages() -> None:
    for header in ({"inputs": [described(name="n" * 10**6)]}, {"inputs": [], "k" * 10**6: 1}):
        with pytest.raises(BadRequestError) as caught:
            parsed(header)
        assert len(str(caught.value)) < 1000


# --- parameters -------------------------------------------------------------------------------------------------------


def test_custom_parameters_are_ignored_everywhere() -> None:
    custom = {"custom": [{"a": None}], "content_type": "np"}
    inputs = [described(parameters=custom, **_DATA)]
    outputs = [{"name": "y", "parameters": custom}]
    received = parsed({"inputs": inputs, "outputs": outputs, "parameters": {**custom, "priority": 3, "timeout": 0}})
    assert (received.request.priority, received.request.timeout) == (3, None)


def test_the_form_of_one_output_wins_over_that_of_all() -> None:
    outputs = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}]
    header = {"inputs": [described(**_DATA)], "outputs": outputs, "parameters": {"binary_data_output": True}}
    forms = parsed(header).forms
    assert [forms.of(name).binary for name in ("y", "z")] == [False, True]


@pytest.mark.parametrize("id", [1, (1 << 64) - 1, "seven", "7"])
def test_a_request_may_be_a_step_of_a_sequence(id: int | str) -> None:
    assert scheduling({"sequence_id": type(id)()}).sequence is None  # 0 and no text are no id

    def step(**parameters: bool) -> SequenceStep | None:
        return scheduling({"sequence_id": id, **parameters}).sequence

    assert step() == SequenceStep(id)
    assert step(sequence_start=True, sequence_end=False) == SequenceStep(id, start=True)
    assert step(sequence_start=False, sequence_end=True) == SequenceStep(id, end=True)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", [datatype for datatype in AS_JSON if "INT" in datatype])
def test_integers_that_do_not_fit_are_refused_and_the_limits_are_not(datatype: str) -> None:
    limits = np.iinfo(NUMPY[datatype])
    low, high = int(limits.min), int(limits.max)
    (tensor,) = parsed({"inputs": [described(shape=[2], datatype=datatype, data=[low, high])]}).request.inputs
    assert np.frombuffer(tensor.data, NUMPY[datatype]).tolist() == [low, high]
    wide = np.dtype(NUMPY[datatype]).newbyteorder("<") if limits.bits == 64 else np.dtype(np.int64)
    assert TensorSpec.of("x", datatype, [2]).of_numbers(np.array([low, high], wide)).data == tensor.data
    for bad in (low - 1, high + 1, 10**300, 1.0, 1.5, True, "1", None):
        words = rf"`x` is {datatype}, which holds whole numbers, written without a point, from {low} to {high}"
        with pytest.raises(BadRequestError, match=words):
            parsed({"inputs": [described(shape=[1], datatype=datatype, data=[bad])]})
    for bad in () if limits.bits == 64 else (low - 1, high + 1):
        with pytest.raises(BadRequestError, match=f"`x` is {datatype}, which holds whole numbers"):
            TensorSpec.of("x", datatype, [1]).of_numbers(np.array([bad], wide))


@pytest.mark.parametrize(
    ("datatype", "too_large"), [("FP32", "1e39"), ("FP32", "-3.5e38"), ("FP64", "1e400"), ("FP64", "-1e999")]
)
def test_a_float_that_would_become_infinity_is_refused(datatype: str, too_large: str) -> None:
    header = json.dumps({"inputs": [described(shape=[1], datatype=datatype, data=["?"])]}).replace('"?"', too_large)
    with pytest.raises(BadRequestError, match=f"`x` is {datatype}, which holds finite numbers"):
        parsed(header.encode())


@pytest.mark.parametrize("bad", [0, 1, "true", None, 1.0])
def test_only_true_and_false_are_bool(bad: object) -> None:
    with pytest.raises(BadRequestError, match="`x` is BOOL, which holds `true` and `false`"):
        parsed({"inputs": [described(shape=[1], datatype="BOOL", data=[bad])]})


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_must_be_binary_in_both_directions(datatype: str) -> None:
    with pytest.raises(
        BadRequestError, match=rf"(?s)`x` is {datatype}, which cannot be given as JSON.*binary_data_size"
    ):
        parsed({"inputs": [described(datatype=datatype, **_DATA)]})
    metadata = METADATA | {"outputs": [{"name": "y", "datatype": datatype, "shape": [1]}]}
    words = rf"(?s)`y` is {datatype}, which cannot be returned as JSON.*`binary_data`: true"
    with pytest.raises(BadRequestError, match=words):
        parsed({"inputs": [described(**_DATA)]}, metadata=metadata)
    with pytest.raises(BadRequestError, match=words):
        encode_answer(answer_of({"y": (datatype, np.zeros(1, NUMPY[datatype]))}), OutputForms(OutputForm(False), {}))
    for asked in ({"parameters": {"binary_data_output": True}}, {"outputs": [{"name": "z"}]}):
        parsed({"inputs": [described(**_DATA)], **asked}, metadata=metadata)


@given(st.data())
def test_nested_and_flat_lists_are_the_same_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    sent = [array.tolist() if shape else [array.item()], array.reshape(-1).tolist()]
    tensors = [
        parsed({"inputs": [described(shape=shape, datatype="INT16", data=each)]}).request.inputs for each in sent
    ]
    assert [tensor.data for (tensor,) in tensors] == [array.astype("<i2").tobytes()] * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_json_cannot_hold_says_how_to_ask_for_it(bad: float) -> None:
    for datatype in ("FP32", "FP64"):
        answer = answer_of({"y": (datatype, np.array([1.0, bad], NUMPY[datatype]))})
        with pytest.raises(BadRequestError, match=r"(?s)`y` has NaN or infinity.*`binary_data`: true"):
            encode_answer(answer, OutputForms(OutputForm(binary=False), {}))
        assert encode_answer(answer, OutputForms(OutputForm(binary=True), {}))[0] is not None


# --- datatypes --------------------------------------------------------------------------------------------------------


def test_dtypes_of_packages_have_a_datatype_or_are_refused_by_name() -> None:
    refused = {dtype for dtype in DTYPES if dtype.startswith(("complex", "float8"))}
    for dtype in DTYPES - refused:
        assert dtype_of(datatype_of(dtype)) == dtype
    for dtype in refused:
        with pytest.raises(NotOfferedError, match=rf"no datatype for {dtype}; .*float32"):
            datatype_of(dtype)


def test_text_and_unknown_datatypes_are_refused_by_name() -> None:
    with pytest.raises(NotOfferedError, match="BYTES is for text"):
        dtype_of("BYTES")
    with pytest.raises(BadRequestError, match=r"no datatype `fp32`; allowed are BOOL, .*FP64"):
        item_size("fp32")


# --- the same rules for gRPC ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", range(0, 65, 8))
def test_only_data_that_is_not_aligned_is_copied(skipped: int) -> None:
    memory = body_buffer(256, 0)
    memory[:] = bytes(range(256))
    data = memory[skipped : skipped + 64]
    tensor = TensorSpec.of("x", "FP64", [8]).of_bytes(data)
    assert tensor.data == data
    shares = np.shares_memory(np.frombuffer(tensor.data, np.uint8), np.frombuffer(data, np.uint8))
    assert shares == (skipped % 64 == 0)
