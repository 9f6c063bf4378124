"""Makes bodies that a broken or hostile client could send. `make test` tries some; benchmarks/serve many more."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import numpy as np

from exportkit.serve.http.infer_endpoint import encode_answer
from exportkit.serve.protocol.datatypes import item_size
from exportkit.serve.protocol.http_request import BodyRules, ParsedBody, body_buffer, header_length_of, parse_body
from exportkit.serve.statuses import ServeError
from tests.serve.protocol.messages import NUMPY, address, answer_of

RULES = BodyRules(
    inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]}],
    outputs=[{"name": "y", "datatype": "FP32", "shape": [-1]}, {"name": "mask", "datatype": "BOOL", "shape": [2]}],
    batched=True,
    max_bytes=4096,
)
_ANSWER = answer_of(
    {"y": ("FP32", np.array([0.5, np.nan], np.float32)), "mask": ("BOOL", np.array([True, False]))}, id="1"
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -0.0, 1, -1, 1.5, 300, 1 << 31, 1 << 63, 1 << 64, -(1 << 63) - 1, 10**40, 1e39, 1e308,
    "", "x", "1", "FP32", "BYTES", "\0", "é\u2028", [], [[]], [1, [2]], {}, {"a": {}}, [0] * 40, "r" * 300,
)  # fmt: skip
_KEYS = (
    "name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "id", "binary_data_size", "binary_data",
    "classification", "shared_memory_region", "sequence_id", "sequence_start", "method",
    "priority", "timeout", "binary_data_output", "model_name", "triton_x", "",
)  # fmt: skip
_TOKENS = (
    b"[" * 5000, b"{", b"}", b"]", b'"', b",", b":", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"\xff\xfe",
    b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\0", b"null", b"-", b"0.", b"/**/", b"\xef\xbb\xbf", b'"name":"x",',
    b'"data":[1],',
)  # fmt: skip
_LENGTHS = ("0", "1", "-1", "1e30", "99999999999", "9" * 40, "", " 1", "0x1", "\u0663", "00")
_SHAPES = ([], [0], [1, 3, 2], [2, 0], [1], [3], [-1], [1 << 32, 1 << 32], [1 << 62], [64])
_SIZES = (0, 1, 3, 4, 12, 24, 48, 4096, 1 << 40, 1 << 63, -1, 1.0)
_LIKELY: dict[Any, tuple[Any, ...]] = {  # wrong, but of the right type
    "datatype": (*NUMPY, "BYTES", "fp32"),
    "shape": _SHAPES,
    "data": (
        [], [1], [[1, 2], [3, 4]], [1, 2, 3], [0.5] * 6, [True] * 6, [-1] * 6, [300] * 6, [[[1], [2]], [[3]]], [[], []],
    ),
    "binary_data_size": _SIZES,
    "priority": _SIZES,
    "timeout": _SIZES,
    "name": ("x0", "x1", "y", "mask", "n" * 300),
}  # fmt: skip


def make(chance: random.Random) -> tuple[bytes, str | None]:
    """Returns a body, and the value of Inference-Header-Content-Length."""
    request, binary = _valid(chance)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        _change_tree(chance, request)
    text = json.dumps(request, ensure_ascii=chance.random() < 0.5).encode()
    length: str | None = str(len(text)) if binary or chance.random() < 0.3 else None
    for _ in range(chance.choice((0, 0, 0, 0, 0, 0, 1, 3))):
        text = _change_bytes(chance, text)
    if length is not None and chance.random() < 0.9:
        length = str(len(text))
    if chance.random() < 0.1:
        length = chance.choice((*_LENGTHS, str(len(text) + chance.randint(-3, 3)), None))
    if chance.random() < 0.1:
        binary = binary[: chance.randrange(len(binary) + 1)] + bytes(chance.randrange(3))
    return text + binary, length


def survives(body: bytes, length: str | None) -> bool:
    """Reads a body as a server does, and answers it. Returns whether it was a request.

    Raises:
        AssertionError: What was read contradicts itself.
        Exception: Anything that is not a ServeError is a bug.
    """
    try:
        number = header_length_of(length)
        buffer = body_buffer(len(body), number)
        buffer[:] = body
        received = parse_body(buffer, number, RULES)
    except ServeError as error:
        _assert_tells(error)
        return False
    _assert_consistent(received)
    try:
        header_length, parts = encode_answer(_ANSWER, received.forms)
    except ServeError as error:
        _assert_tells(error)
        return True
    written = b"".join(parts)
    assert len(json.loads(written[:header_length])["outputs"]) == 2
    return True


def _assert_tells(error: ServeError) -> None:
    message = str(error)
    assert 10 < len(message) < 2000
    json.dumps({"error": message}).encode()


def _assert_consistent(received: ParsedBody) -> None:
    names = [tensor.name for tensor in received.request.inputs]
    assert len(set(names)) == len(names)
    for tensor in received.request.inputs:
        assert tensor.data.nbytes == math.prod(tensor.shape) * item_size(tensor.datatype)
        assert not tensor.data.nbytes or address(tensor.data) % 64 == 0
        if tensor.datatype == "BOOL":
            assert set(bytes(tensor.data)) <= {0, 1}
    assert received.request.timeout is None or received.request.timeout > 0


def _valid(chance: random.Random) -> tuple[dict[str, Any], bytes]:
    binary, inputs = b"", []
    for number in range(chance.randint(1, 3)):
        datatype = chance.choice(tuple(NUMPY))
        shape = list(chance.choice(_SHAPES[:6]))
        count = math.prod(shape)
        tensor: dict[str, Any] = {"name": f"x{number}", "shape": shape, "datatype": datatype}
        kind = chance.random()
        if kind < 0.6:
            data = bytes(chance.randrange(2) for _ in range(count * item_size(datatype)))
            tensor["parameters"] = {"binary_data_size": len(data)}
            binary += data
        else:
            tensor["data"] = [chance.randrange(2) == 1 if datatype == "BOOL" else chance.randrange(100)] * count
        inputs.append(tensor)
    request: dict[str, Any] = {"id": "1", "inputs": inputs}
    if chance.random() < 0.5:
        request["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}, {"name": "mask"}]
    if chance.random() < 0.5:
        request["parameters"] = {"priority": 1, "timeout": 1000, "binary_data_output": True}
    return request, binary


def _change_tree(chance: random.Random, request: dict[str, Any]) -> None:
    """Replaces, removes or adds one value somewhere."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        if isinstance(node, (dict, list)):
            for key in node if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                visit(node[key])

    visit(request)
    if chance.random() < 0.6:
        places = [place for place in places if place[1] in _LIKELY]
    if not places:
        return
    node, key = chance.choice(places)
    action = chance.random()
    if action < 0.5 and key in _LIKELY:
        node[key] = copy.deepcopy(chance.choice(_LIKELY[key]))
    elif action < 0.6:
        node[key] = copy.deepcopy(chance.choice(_VALUES))
    elif action < 0.7:
        del node[key]
    elif isinstance(node, dict):
        node[chance.choice(_KEYS)] = copy.deepcopy(chance.choice(_VALUES))
    else:
        node.append(copy.deepcopy(node[key]))


def _change_bytes(chance: random.Random, text: bytes) -> bytes:
    place = chance.randrange(len(text) + 1)
    action = chance.random()
    if action < 0.3:
        return text[:place] + bytes([chance.randrange(256)]) + text[place + 1 :]
    if action < 0.5:
        return text[:place] + text[place + chance.randint(1, 8) :]
    if action < 0.6:
        return text[:place]
    if action < 0.9:
        return text[:place] + chance.choice(_TOKENS) + text[place:]
    other = chance.randrange(len(text) + 1)
    return text[:place] + text[other : other + 40] + text[place:]
