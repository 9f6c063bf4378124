"""Finds tensors in the bytes of a message without copying them.

protobuf would copy every `bytes` field of a message that it parses or builds. The wire format:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from exportkit.serve.statuses import BadRequestError

Data = bytes | bytearray | memoryview

_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)


def split(data: Data, number: int, most_fields: int) -> tuple[Data, list[memoryview]]:
    """Takes the length-delimited fields `number` out of a message.

    Args:
        data: The message.
        number: The number of the fields.
        most_fields: The most fields that the message may have. Each is some instructions of Python, and millions of
            them would hold up everybody.

    Returns:
        The message without these fields, and the value of each as a view of `data`. Whether the rest of the message is
        valid is not checked: who parses it does.

    Raises:
        BadRequestError: The fields cannot be told apart, or there are more than `most_fields`.
    """
    rest: list[memoryview] = []
    values: list[memoryview] = []
    view = memoryview(data)
    mark = 0
    for start, value, end in _fields(data, number, most_fields):
        rest.append(view[mark:start])
        values.append(view[value:end])
        mark = end
    if not values:
        return data, values
    rest.append(view[mark:])
    return b"".join(rest), values


@lru_cache(1024)
def field_head(number: int, size: int) -> bytes:
    """Returns what stands before the bytes of a length-delimited field."""
    return _encoded(number << 3 | _LENGTH) + _encoded(size)


def _fields(data: Data, number: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yields where each length-delimited field `number` starts, where its value starts, and where it ends."""
    at = depth = count = 0
    while at < len(data):
        start = at
        count += 1
        if count > most:
            raise BadRequestError(f"a message has more than {most} fields")
        tag, at = _varint(data, at)
        kind = tag & 7
        value = at
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _LENGTH:
            size, value = _varint(data, at)
            at = value + size
        elif kind == _GROUP:
            depth += 1
        elif kind == _END_GROUP:
            depth -= 1
        else:
            raise BadRequestError(f"the message has a field of wire type {kind} at byte {start}; there are 0 to 5")
        if at > len(data):
            raise BadRequestError(f"the message ends within the field that starts at byte {start}")
        if depth == 0 and kind == _LENGTH and tag >> 3 == number:
            yield start, value, at


def _varint(data: Data, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise BadRequestError(f"the message has a number at byte {at} that does not end")


def _encoded(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
