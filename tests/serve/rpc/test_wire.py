"""The scanner of messages takes and refuses what protobuf's own parser takes and refuses."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.serve.rpc.message_classes import message_class
from exportkit.serve.rpc.wire import field_head, split
from exportkit.serve.statuses import BadRequestError

REQUEST = message_class("inference.ModelInferRequest")
RAW = 7
MOST = 1000


def varint(value: int, extra: int = 0) -> bytes:
    """`extra` makes it longer than it need be, which is allowed."""
    digits = []
    while value >= 0x80 or extra:
        extra -= value < 0x80
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def field(number: int, kind: int, value: bytes, extra: int = 0) -> bytes:
    return varint(number << 3 | kind, extra) + (varint(len(value), extra) if kind == 2 else b"") + value


numbers = st.sampled_from([*range(9), 15, 16, 1000, (1 << 29) - 1, 1 << 29])
extras = st.integers(0, 4)
scalars = st.one_of(
    st.builds(lambda n, v, e: field(n, 0, varint(v, e)), numbers, st.integers(0, (1 << 64) - 1), extras),
    st.builds(lambda n, v: field(n, 1, v), numbers, st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, v: field(n, 5, v), numbers, st.binary(min_size=4, max_size=4)),
    st.builds(lambda n, v, e: field(n, 2, v, e), numbers, st.binary(max_size=12), extras),
    st.builds(lambda v: field(RAW, 2, v), st.binary(max_size=12)),
    st.builds(lambda v: field(5, 2, b"\x0a" + varint(len(v)) + v), st.text("ab", max_size=3).map(str.encode)),
)
groups = st.recursive(
    scalars,
    lambda inner: st.builds(
        lambda n, m, parts: field(n, 3, b"".join(parts)) + field(m, 4, b""),
        numbers,
        numbers,
        st.lists(inner, max_size=3),
    ),
    max_leaves=6,
)
messages = st.lists(groups, max_size=8).map(b"".join)
broken = st.one_of(
    st.builds(lambda data, cut: data[: len(data) * cut // 16], messages, st.integers(0, 16)),
    st.builds(lambda data, tail: data + tail, messages, st.binary(max_size=12)),
    st.binary(max_size=40),
)


def check(data: bytes) -> bool:
    """Whether the message is valid; by both."""
    try:
        whole = REQUEST.FromString(data)
    except DecodeError:
        whole = None
    try:
        rest, values = split(data, RAW, MOST)
        parsed = REQUEST.FromString(rest)
    except (BadRequestError, DecodeError):
        assert whole is None, data.hex()
        return False
    assert whole is not None, data.hex()
    assert not parsed.raw_input_contents
    assert [bytes(value) for value in values] == list(whole.raw_input_contents)
    parsed.raw_input_contents.extend(bytes(value) for value in values)
    assert parsed.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)
    return True


@settings(max_examples=150)
@given(messages)
def test_what_protobuf_reads_is_split_as_protobuf_reads_it(data: bytes):
    check(data)


@settings(max_examples=150)
@given(broken)
def test_what_protobuf_refuses_is_refused(data: bytes):
    check(data)


def test_every_cut_of_a_message_is_judged_as_protobuf_judges_it():
    whole = REQUEST(model_name="m", id="1", raw_input_contents=[b"abc", b"", b"d" * 300])
    whole.inputs.add(name="x", datatype="FP32", shape=[1, 300])
    whole.parameters["timeout"].int64_param = -1
    data = whole.SerializeToString()
    valid = [check(data[:cut]) for cut in range(len(data) + 1)]
    assert valid[0]
    assert valid[-1]
    assert not all(valid)


def test_values_are_views_and_not_copies():
    data = field(1, 2, b"m") + field(RAW, 2, b"abc") + field(3, 2, b"id") + field(RAW, 2, b"")
    rest, values = split(data, RAW, MOST)
    assert rest == field(1, 2, b"m") + field(3, 2, b"id")
    assert [bytes(value) for value in values] == [b"abc", b""]
    assert all(value.obj is data for value in values)


def test_a_message_without_such_fields_is_returned_itself():
    data = field(1, 2, b"m")
    assert split(data, RAW, MOST)[0] is data


def test_a_field_within_a_group_is_not_a_field_of_the_message():
    data = field(9, 3, field(RAW, 2, b"abc")) + field(9, 4, b"")
    assert split(data, RAW, MOST) == (data, [])
    assert check(data)


@pytest.mark.parametrize("inside", [False, True], ids=["fields", "fields of a group"])
def test_millions_of_fields_are_refused_before_they_are_counted(inside: bool):
    fields = field(1, 2, b"") * (MOST + 1)
    data = field(9, 3, fields) + field(9, 4, b"") if inside else fields
    with pytest.raises(BadRequestError, match="more than 1000 fields"):
        split(data, RAW, MOST)


@pytest.mark.parametrize("size", [127, 128, 16383, 16384, 1 << 21])
def test_lengths_of_every_number_of_digits(size: int):
    data = field_head(RAW, size) + bytes(size)
    assert [len(value) for value in split(data, RAW, MOST)[1]] == [size]
    assert check(data)
