"""What is read out of a step's head without protobuf is what protobuf reads."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from exportkit.serve.rpc.step_heads import read_head


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Requests as clients write them, and such that are nearly so."""
    request = service_pb2.ModelInferRequest(
        model_name=draw(st.sampled_from(["net", ""])), id=draw(st.text(max_size=40))
    )
    sequence = draw(st.one_of(st.integers(-2, 1 << 40), st.text(max_size=140), st.none()))
    if isinstance(sequence, str):
        request.parameters["sequence_id"].string_param = sequence
    elif sequence is not None:
        request.parameters["sequence_id"].int64_param = sequence
    for name in draw(st.lists(st.sampled_from(["sequence_start", "sequence_end", "priority", "own"]), max_size=4)):
        if draw(st.booleans()):
            request.parameters[name].bool_param = draw(st.booleans())
        else:
            request.parameters[name].int64_param = draw(st.integers(0, 300))
    request.inputs.add(name="x", datatype="INT8", shape=[1, 8])
    request.raw_input_contents.append(bytes(8))
    parts = [request.SerializeToString()]
    if draw(st.booleans()):
        parts.append(draw(st.binary(max_size=12)))
    return b"".join(draw(st.permutations(parts)))


def check(data: bytes) -> None:
    ours = read_head(data)
    if ours is None:
        return
    with contextlib.suppress(DecodeError):  # the rest of it may be anything: such a form is never learnt
        head = service_pb2.ModelInferRequest.FromString(data[: ours.data])
        given = head.parameters["sequence_id"]
        assert head.id == ours.id
        assert (given.int64_param or given.string_param) == ours.step.id
        assert head.parameters["sequence_start"].bool_param == ours.step.start
        assert head.parameters["sequence_end"].bool_param == ours.step.end


@settings(max_examples=400, deadline=None)
@given(requests(), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=3))
def test_what_is_read_is_what_protobuf_reads(data: bytes, changes: list[tuple[int, int]]):
    changed = bytearray(data)
    for place, byte in changes:
        if changed:
            changed[place % len(changed)] = byte
    check(bytes(changed))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_are_read_as_protobuf_reads_them(data: bytes):
    check(data)


@pytest.mark.parametrize("size", [100, 480, 500, 512, 513, 514, 600])
def test_long_heads_are_left_to_protobuf(size: int):
    request = service_pb2.ModelInferRequest(model_name="n" * size)
    request.parameters["sequence_id"].int64_param = 3
    data = request.SerializeToString()
    check(data)
    assert (read_head(data) is None) == (len(data) > 512)
