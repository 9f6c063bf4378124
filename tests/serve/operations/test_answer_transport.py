"""The head of an answer is sent with the beginning of its body, and nothing is lost, reordered or held for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.serve.operations.answer_transport import AnswerTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """A transport that keeps what each call sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.sent.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def answered(wire: Any, parts: list[bytes], turns: set[int]) -> None:
    """Writes a head and the parts; the event loop turns before those parts whose numbers are in `turns`."""
    transport = AnswerTransport(wire, asyncio.get_running_loop())
    transport.write(HEAD)
    for number, part in enumerate(parts):
        if number in turns:
            await asyncio.sleep(0)
        transport.write(memoryview(part))
    await asyncio.sleep(0)


@given(st.lists(st.binary(max_size=30), max_size=6), st.sets(st.integers(0, 5)))
def test_all_arrives_in_order(parts: list[bytes], turns: set[int]):
    wire = Wire()
    asyncio.run(answered(wire, parts, turns))
    assert b"".join(wire.sent) == HEAD + b"".join(parts)


@pytest.mark.parametrize("size", [1, 64 << 10, (64 << 10) + 1, 1 << 20])
def test_the_head_is_sent_with_the_body(size: int):
    wire = Wire()
    asyncio.run(answered(wire, [b"", bytes(size), b"more"], set()))
    assert wire.sent == [HEAD + bytes(size), b"more"]


def test_the_head_waits_for_one_turn_only():
    async def streams() -> None:
        wire: Any = Wire()
        AnswerTransport(wire, asyncio.get_running_loop()).write(HEAD)
        assert wire.sent == []
        await asyncio.sleep(0)
        assert wire.sent == [HEAD]

    asyncio.run(streams())


def test_closing_sends_the_head():
    async def closes() -> None:
        wire: Any = Wire()
        transport = AnswerTransport(wire, asyncio.get_running_loop())
        transport.write(HEAD)
        transport.close()
        assert wire.sent == [HEAD]
        assert transport.is_closing()
        await asyncio.sleep(0)
        assert wire.sent == [HEAD]

    asyncio.run(closes())
