"""How much memory a request and an answer take beside their body."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from exportkit.serve.protocol.answer_body import encode_answer
from exportkit.serve.protocol.http_request import BodyRules, body_buffer, parse_body
from exportkit.serve.protocol.parameters import OutputForm, OutputForms
from exportkit.serve.statuses import ServeError
from tests.serve.protocol.messages import METADATA, address, answer_of, described

_SIZE = 30_000_000  # bytes of a large input


def rules(max_bytes: int) -> BodyRules:
    return BodyRules(METADATA["inputs"], METADATA["outputs"], True, max_bytes)


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Appends the most bytes that were allocated at a time inside of the context."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["x", "x" * 37])  # the length of the JSON does not decide where the tensor starts
def test_a_large_request_takes_its_body_and_no_second_one(name: str) -> None:
    shape = [_SIZE // 4]
    header = json.dumps({"inputs": [described(name, shape=shape, parameters={"binary_data_size": _SIZE})]}).encode()
    chunk = bytes(1 << 16)
    with _peak() as peak:
        body = body_buffer(len(header) + _SIZE, len(header))
        body[: len(header)] = header
        for start in range(len(header), len(body), len(chunk)):
            part = chunk[: len(body) - start]
            body[start : start + len(part)] = part
        received = parse_body(body, len(header), rules(_SIZE))
    (tensor,) = received.request.inputs
    assert address(tensor.data) == address(body) + len(header)
    assert address(tensor.data) % 64 == 0
    assert _SIZE <= peak[0] <= 1.2 * len(body)


@pytest.mark.parametrize(
    ("start", "unit", "end"),
    [
        (b'{"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [0', b",0", b"]}]}"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0.5', b",0.5", b"]}]}"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1000000, 0], "data": [[]', b",[]", b"]}]}"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1', b",1", b'], "data": []}]}'),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [], "parameters": {"a": [0', b",[]", b"]}}]}"),
        (
            b'{"inputs": [{"name": "", "datatype": "", "shape": []}',
            b',{"name": "", "datatype": "", "shape": []}',
            b"]}",
        ),
        (b'{"inputs": [{"name": ""', b',"name":""', b', "datatype": "", "shape": []}]}'),
        (b'{"inputs": [{}', b",{}", b"]}"),
        (b'{"inputs": [], "outputs": [{"name": ""}', b',{"name":""}', b"]}"),
        (b'{"inputs": [], "parameters": {"a": 0', b',"a":0', b"}}"),
        (b'{"inputs": [], "parameters": {"a": [0', b",[]", b"]}}"),
        (b'{"inputs": [], "id": ""', b',"id":""', b"}"),
        (b'{"inputs": [], "x": [0', b",[]", b"]}"),
    ],
)
def test_a_hostile_text_does_not_become_many_objects(start: bytes, unit: bytes, end: bytes) -> None:
    text = memoryview(start + unit * (3_000_000 // len(unit)) + end)
    with _peak() as peak, pytest.raises(ServeError):
        parse_body(text, None, rules(1000))
    assert peak[0] <= 5 * len(text)


def test_a_large_answer_is_handed_out_as_the_outputs_own_memory() -> None:
    array = np.zeros(_SIZE // 4, np.float32)
    answer = answer_of({"y": ("FP32", array), "small": ("INT8", np.zeros(3, np.int8))})
    with _peak() as peak:
        _, parts = encode_answer(answer, OutputForms(OutputForm(binary=True), {}))
    assert [len(part) for part in parts[1:]] == [_SIZE, 3]
    assert address(memoryview(parts[1])) == array.ctypes.data
    assert peak[0] <= 0.01 * _SIZE
