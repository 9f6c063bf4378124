"""A body that breaks the protocol is refused, whatever it is, and costs little memory."""

from __future__ import annotations

import random

import pytest

from exportkit.serve.protocol.http_request import BodyRules, parse_body
from exportkit.serve.statuses import ServeError
from tests.serve.memory import traced_memory
from tests.serve.protocol.hostile_bodies import make, survives
from tests.serve.protocol.messages import METADATA


def test_no_body_raises_what_is_not_ours() -> None:
    """benchmarks/serve/fuzz_protocol.py tries a million."""
    chance = random.Random(0)
    requests = sum(survives(*make(chance)) for _ in range(20_000))
    assert 2_000 < requests < 18_000  # the changes reach both what is read and what is refused


@pytest.mark.parametrize(
    ("start", "unit", "end"),
    [
        (b'{"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [0', b",0", b"]}]}"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0.5', b",0.5", b"]}]}"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1000000, 0], "data": [[]', b",[]", b"]}]}"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1', b",1", b'], "data": []}]}'),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [], "parameters": {"a": [0', b",[]", b"]}}]}"),
        (b'{"inputs": [{"name":"","datatype":"","shape":[]}', b',{"name":"","datatype":"","shape":[]}', b"]}"),
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
    rules = BodyRules(METADATA["inputs"], METADATA["outputs"], True, 1000)
    with traced_memory() as memory, pytest.raises(ServeError):
        parse_body(text, None, rules)
    assert memory.peak <= 5 * len(text)
