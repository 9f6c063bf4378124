"""Reads what stands before the elements of a step's inputs without protobuf.

Only what is written as clients write it is read. For everything else, protobuf's reading counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.rpc.rpc_stream import Message

_ID, _PARAMETER, _DATA = 0x1A, 0x22, 0x3A  # the first byte of these fields of ModelInferRequest
_KEY, _VALUE = 0x0A, 0x12  # of an entry of its parameters
_TRUTH, _WHOLE_NUMBER, _TEXT = 0x08, 0x10, 0x1A  # of a parameter
MOST_HEAD, _MOST_ID, _MOST_REQUEST_ID = 512, 128, 127


class StepHead(NamedTuple):
    """The head of a step.

    Attributes:
        form: Its bytes without the request's id and the sequence's parameters.
        id: The request's id.
        step: The sequence.
        data: Where `raw_input_contents` begin.
    """

    form: bytes
    id: str
    step: SequenceStep
    data: int


class _NotPlainError(Exception):
    """Protobuf has to read it."""


def read_head(message: Message) -> StepHead | None:
    """Returns the head of a message; None: it is no step of a sequence, or protobuf has to read it."""
    head = bytes(message[: MOST_HEAD + 1])
    try:
        return _read(head)
    except (_NotPlainError, UnicodeDecodeError, IndexError):
        return None


def _read(head: bytes) -> StepHead:
    form: list[bytes] = []
    found: dict[bytes, int | str] = {}
    at, request_id = 0, None
    while at < len(head) and head[at] != _DATA:
        start, kind = at, head[at]
        _check(8 <= kind < 0x38 and kind & 7 == 2)
        value, at = _field(head, at)
        _check(at <= MOST_HEAD)
        if kind == _ID:
            _check(request_id is None and len(value) <= _MOST_REQUEST_ID)
            request_id = value.decode()
            continue
        if kind == _PARAMETER:
            name, parameter = _entry(value)
            if (read := _READS.get(name)) is not None:
                _check(name not in found)
                found[name] = read(parameter)
                continue
        form.append(head[start:at])
    _check(b"sequence_id" in found)
    start, end = (bool(found.get(name, False)) for name in (b"sequence_start", b"sequence_end"))
    return StepHead(b"".join(form), request_id or "", SequenceStep(found[b"sequence_id"], start, end), at)


def _check(holds: bool) -> None:
    if not holds:
        raise _NotPlainError


def _field(data: bytes, at: int) -> tuple[bytes, int]:
    size, start = _number(data, at + 1)
    end = start + size
    _check(end <= len(data))
    return data[start:end], end


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            _check(value < 1 << 64)
            return value, at
    raise _NotPlainError


def _entry(data: bytes) -> tuple[bytes, bytes]:
    _check(data[0] == _KEY)
    name, at = _field(data, 0)
    _check(data[at] == _VALUE)
    value, at = _field(data, at)
    _check(at == len(data))
    return name, value


def _id(value: bytes) -> int | str:
    if value[0] == _WHOLE_NUMBER:
        number, at = _number(value, 1)
        _check(at == len(value) and 0 < number < 1 << 63)
        return number
    _check(value[0] == _TEXT)
    encoded, at = _field(value, 0)
    text = encoded.decode()
    _check(at == len(value) and 0 < len(text) <= _MOST_ID)
    return text


def _truth(value: bytes) -> bool:
    _check(len(value) == 2 and value[0] == _TRUTH and value[1] <= 1)
    return value[1] == 1


_READS: dict[bytes, Callable[[bytes], int | str]] = {
    b"sequence_id": _id,
    b"sequence_start": _truth,
    b"sequence_end": _truth,
}
