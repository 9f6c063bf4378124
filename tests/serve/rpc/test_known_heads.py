"""Requests that are like one before are found by their bytes, and answered as the others are."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.rpc.infer_messages import ReceivedRequest
from exportkit.serve.rpc.known_heads import Found, KnownForm, KnownHeads


class Model:
    """Stands in for one that answered."""


MODEL = Model()


def message(request_id: str = "", sequence: int = 7, value: int = 1, size: int = 8, **more: Any) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="net", id=request_id, **more)
    request.parameters["sequence_id"].int64_param = sequence
    request.inputs.add(name="x", datatype="INT8", shape=[1, size])
    request.raw_input_contents.append(bytes([value] * size))
    return bytes(request.SerializeToString())


def learnt(heads: KnownHeads, data: bytes, model: Any = MODEL) -> bool:
    """Learns a request as the service does. Returns whether it can be known."""
    received = ReceivedRequest(data)
    request = received.request(None)
    assert request.sequence is not None
    found = heads.learn(data, [tensor.data.nbytes for tensor in request.inputs], request.id, request.sequence)
    if found is None:
        return False
    heads.add(found[0], KnownForm(0, found[1], weakref.ref(model), None, ("net", "", None)))  # type: ignore[arg-type]
    return True


def found(heads: KnownHeads, data: bytes) -> Found | None:
    return heads.find(data)


@pytest.mark.parametrize("version", ["", "3"])
def test_another_id_and_other_elements_are_found(version: str):
    heads = KnownHeads()
    assert learnt(heads, message("a", model_version=version))
    for request_id in ("", "b", "a longer id of a request", "\u00e9"):
        result = found(heads, message(request_id, value=5, model_version=version))
        assert result is not None
        assert (result.id, result.step) == (request_id, SequenceStep(7))
        assert [bytes(each) for each in result.data] == [bytes([5] * 8)]


@pytest.mark.parametrize("learnt_from_a_start", [False, True])
def test_other_sequences_their_starts_and_their_ends_are_found(learnt_from_a_start: bool):
    heads = KnownHeads()
    first = service_pb2.ModelInferRequest.FromString(message("a"))
    first.parameters["sequence_start"].bool_param = learnt_from_a_start
    assert learnt(heads, first.SerializeToString())
    for start, end in itertools.product((False, True), repeat=2):
        for sequence in (1, 300, (1 << 63) - 1, "seven", "s" * 128):
            request = service_pb2.ModelInferRequest.FromString(message("b", value=4))
            key = "string_param" if isinstance(sequence, str) else "int64_param"
            setattr(request.parameters["sequence_id"], key, sequence)
            request.parameters["sequence_start"].bool_param = start
            request.parameters["sequence_end"].bool_param = end
            for _ in range(2):
                result = found(heads, request.SerializeToString())
                assert result is not None
                assert (result.id, result.step) == ("b", SequenceStep(sequence, start, end))
                assert [bytes(each) for each in result.data] == [bytes([4] * 8)]


def test_what_differs_in_anything_else_is_not_found():
    heads = KnownHeads()
    assert learnt(heads, message("a"))
    others = [message("a", sequence=0), message("a", size=9), message("a", model_version="2"), b"", b"\x0a", bytes(40)]
    request = service_pb2.ModelInferRequest.FromString(message("a"))
    request.parameters["priority"].int64_param = 1
    others.append(request.SerializeToString())
    request = service_pb2.ModelInferRequest.FromString(message("a"))
    request.raw_input_contents.append(b"more")
    others.append(request.SerializeToString())
    others += [message("a")[:-1], message("a") + b"\0", message("x" * 200)]
    for other in others:
        assert found(heads, other) is None


def test_a_parameter_that_is_there_twice_is_left_to_protobuf():
    heads = KnownHeads()
    assert learnt(heads, message("a"))
    again = service_pb2.ModelInferRequest()
    again.parameters["sequence_id"].int64_param = 9
    assert found(heads, again.SerializeToString() + message("a")) is None
    # An entry whose value stands before its key is one all the same.
    entry = b"\x12\x02\x10\x09" + b"\x0a\x0bsequence_id"
    assert found(heads, b"\x22" + bytes([len(entry)]) + entry + message("a")) is None


def test_several_inputs_are_found_in_the_order_of_the_request():
    request = service_pb2.ModelInferRequest(model_name="net")
    request.parameters["sequence_id"].string_param = "seven"
    for name, content in (("b", b"12"), ("a", b"345")):
        request.inputs.add(name=name, datatype="UINT8", shape=[1, len(content)])
        request.raw_input_contents.append(content)
    heads = KnownHeads()
    data = request.SerializeToString()
    assert learnt(heads, data)
    result = found(heads, data)
    assert result is not None
    assert [bytes(each) for each in result.data] == [b"12", b"345"]


def test_typed_contents_and_long_heads_are_not_learnt():
    typed = service_pb2.ModelInferRequest(model_name="net")
    typed.parameters["sequence_id"].int64_param = 7
    tensor = typed.inputs.add(name="x", datatype="INT8", shape=[1, 2])
    tensor.contents.int_contents.extend([1, 2])
    assert not learnt(KnownHeads(), typed.SerializeToString())
    assert not learnt(KnownHeads(), message("a", outputs=[{"name": f"an output {n}"} for n in range(40)]))


def test_a_model_that_is_gone_is_not_kept():
    heads, model = KnownHeads(), Model()
    assert learnt(heads, message(), model)
    assert found(heads, message()) is not None
    del model
    gc.collect()
    assert found(heads, message()) is None
    assert not heads._heads
    assert not heads._forms


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_request_that_is_found_is_what_protobuf_reads(changes: list[tuple[int, int]]):
    heads = KnownHeads()
    learnt(heads, message("some id"))
    data = bytearray(message("other"))
    for place, byte in changes:
        data[place % len(data)] = byte
    result = found(heads, bytes(data))
    if result is not None:
        theirs = service_pb2.ModelInferRequest.FromString(bytes(data))
        assert (theirs.id, theirs.model_name) == (result.id, "net")
        step, theirs_say = result.step, theirs.parameters
        assert (theirs_say["sequence_id"].int64_param or theirs_say["sequence_id"].string_param) == step.id
        assert (theirs_say["sequence_start"].bool_param, theirs_say["sequence_end"].bool_param) == (
            step.start,
            step.end,
        )
        assert [bytes(each) for each in result.data] == list(theirs.raw_input_contents)
        assert np.frombuffer(result.data[0], np.int8).size == 8
