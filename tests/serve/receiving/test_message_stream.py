"""Messages arrive whole and in order, however the socket cuts them."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.errors import ExportkitError
from exportkit.serve import statuses
from exportkit.serve.protocol.inference import Timing
from exportkit.serve.receiving.message_stream import MessageStream
from exportkit.serve.receiving.receiver_messages import (
    Answered,
    Forward,
    Freed,
    FromReceiver,
    Leave,
    Part,
    Refused,
    Setup,
    ToReceiver,
    decoder,
    encode,
)
from exportkit.serve.serve_options import ListenOptions, ServeOptions

TIMING = Timing(0.1, 0.2, 0.3, 0.4, 5)
PARTS = st.builds(Part, st.text(), st.just("FP32"), st.tuples(st.integers(0, 9)), st.integers(0, 9))
MESSAGES = st.one_of(
    st.builds(Freed, st.integers(0, 1 << 62)),
    st.builds(Refused, st.integers(0, 9), st.just("BadRequestError"), st.text(), st.none() | st.text(), st.booleans()),
    st.builds(
        Answered,
        st.integers(0, 9),
        st.lists(PARTS).map(tuple),
        st.just(TIMING),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(MESSAGES, st.lists(st.binary(max_size=300_000), max_size=3)), max_size=6), st.data())
def test_messages_arrive_whole_and_in_order(sent: list[tuple[Any, list[bytes]]], data: st.DataObject) -> None:
    stream = b""
    for message, parts in sent:
        body = encode(message)
        stream += struct.pack("!IQ", len(body), sum(map(len, parts))) + body + b"".join(parts)
    received: list[tuple[Any, bytes]] = []
    reading: MessageStream[Any] = MessageStream(
        decoder(ToReceiver), lambda message, behind: received.append((message, bytes(behind))), lambda: None
    )
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        reading.data_received(stream[:size])
        stream = stream[size:]
    assert received == [(message, b"".join(parts)) for message, parts in sent]


def test_both_ends_of_a_socket() -> None:
    payload = os.urandom(3 << 20)

    async def talk() -> list[Any]:
        heard: list[Any] = []
        ended = [asyncio.Event(), asyncio.Event()]
        ours, theirs = socket.socketpair()
        here: MessageStream[Any] = MessageStream(decoder(ToReceiver), lambda *_: None, ended[0].set)
        there: MessageStream[Any] = MessageStream(
            decoder(FromReceiver), lambda message, behind: heard.append((message, bytes(behind))), ended[1].set
        )
        await here.connect(ours)
        await there.connect(theirs)
        here.send(Leave(1))
        here.send(Forward(2, {"path": "/"}, [(b"a", b"b")], "id"), [memoryview(payload), memoryview(b"")])
        here.send(Leave(3))
        here.close()
        await asyncio.gather(*(each.wait() for each in ended))
        here.send(Leave(4))  # to nobody
        return heard

    first, second, third = asyncio.run(talk())
    assert (first, third) == ((Leave(1), b""), (Leave(3), b""))
    assert second == (Forward(2, {"path": "/"}, [(b"a", b"b")], "id"), payload)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(FromReceiver).decode(encode(Freed(1)))


def test_options_arrive_as_they_were() -> None:
    odd = Path(os.fsdecode(b"/keys/\xff.txt"))  # not UTF-8
    options = ServeOptions(
        packages=(Path("a.pt2"),), listen=ListenOptions(api_keys=odd, receivers=2), drain_seconds=1.5
    )
    setup = Setup(options, 512, 1 << 36, ("/",))
    assert decoder(Setup).decode(encode(setup)) == setup


ERRORS = [
    kind
    for kind in vars(statuses).values()
    if isinstance(kind, type) and issubclass(kind, statuses.ServeError) and kind is not ExportkitError
]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_arrives_as_it_was(kind: type[statuses.ServeError]) -> None:
    error = decoder(ToReceiver).decode(encode(Refused.of(7, kind("no", hint="do")))).error()
    assert type(error) is kind
    assert (error.message, error.hint, error.status) == ("no", "do", kind.status)


def test_a_failure_arrives_with_its_traceback() -> None:
    try:
        raise ZeroDivisionError("a secret")
    except ZeroDivisionError as error:
        refused = Refused.of(7, error)
    told = str(refused.error())
    assert "ZeroDivisionError: a secret" in told
    assert "test_message_stream.py" in told
