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
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InferTiming, InputTensor, OutputTensor
from exportkit.serve.receiving.message_stream import MessageStream
from exportkit.serve.receiving.receiver_messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Answered,
    Cancel,
    Forward,
    FromReceiver,
    GrowRequest,
    InputsReleased,
    Place,
    ReceiverMessage,
    Refused,
    Setup,
    Submission,
    ToReceiver,
    decoder,
    encode,
)
from exportkit.serve.serve_options import ListenOptions, ServeOptions

NOTHING = memoryview(b"")
OUTPUTS = st.builds(OutputTensor, st.text(), st.just("FP32"), st.tuples(st.integers(0, 9)), st.just(NOTHING))
ANSWERS = st.builds(
    InferAnswer,
    st.text(),
    st.text(),
    st.text(),
    st.lists(OUTPUTS).map(tuple),
    st.just(InferTiming(0.1, 0.2, 0.3, 0.4, 5)),
)
MESSAGES = st.one_of(
    st.builds(InputsReleased, st.integers(0, 1 << 62)),
    st.builds(Refused, st.integers(0, 9), st.just("BadRequestError"), st.text(), st.none() | st.text(), st.booleans()),
    st.builds(Answered, st.integers(0, 9), ANSWERS, st.lists(st.integers(0, 9)).map(tuple)),
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
        here.send(Cancel(1))
        here.send(Forward(2, {"path": "/"}, [(b"a", b"b")], "id"), [memoryview(payload), memoryview(b"")])
        here.send(Cancel(3))
        here.close()
        await asyncio.gather(*(each.wait() for each in ended))
        here.send(Cancel(4))  # to nobody
        return heard

    first, second, third = asyncio.run(talk())
    assert (first, third) == ((Cancel(1), b""), (Cancel(3), b""))
    assert second == (Forward(2, {"path": "/"}, [(b"a", b"b")], "id"), payload)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(FromReceiver).decode(encode(InputsReleased(1)))


def request(shape: tuple[int, ...]) -> InferRequest:
    tensor = InputTensor("x", "FP32", shape, NOTHING)
    return InferRequest((tensor,), ("y",), "7", 1, 0.5)


def test_requests_and_rules_arrive_as_they_were() -> None:
    submission = Submission(3, request((2, 3)), (Place(64, 24),))
    assert decoder(FromReceiver).decode(encode(submission)) == submission
    tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
    answer = AdmissionAnswer(3, "m", "1", 5, BodyRules([tensor], [], True, 1000), None)
    assert decoder(ToReceiver).decode(encode(answer)) == answer


@pytest.mark.parametrize(
    "forged",
    [
        AdmissionRequest(1, "m", "", -(10**15)),  # which would make room
        GrowRequest(1, -1),
        Submission(1, request((1,)), (Place(-10, 5),)),
        Submission(1, request((1,)), (Place(10, -5),)),
        Submission(1, request((-1,)), (Place(0, 4),)),
        Cancel(-1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nothing_negative_is_understood(forged: ReceiverMessage) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(FromReceiver).decode(encode(forged))


@pytest.mark.parametrize("said", [b"\xc1", b"\x93\xa7Unknown\x01\x02", encode(GrowRequest(1, -1)), encode(Cancel(5))])
def test_what_cannot_be_understood_ends_the_connection(said: bytes) -> None:
    """So does a message that is understood, and that its receiver does not expect."""

    async def talk() -> None:
        ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        heard: list[Any] = []

        def unexpected(message: Any, behind: memoryview) -> None:
            heard.append(message)
            raise KeyError(message.number)

        stream: MessageStream[Any] = MessageStream(decoder(FromReceiver), unexpected, ended.set)
        await stream.connect(ours)
        theirs.sendall(struct.pack("!IQ", len(said), 0) + said + struct.pack("!IQ", 3, 0))
        await asyncio.wait_for(ended.wait(), 60)
        assert heard == ([Cancel(5)] if said == encode(Cancel(5)) else [])
        theirs.close()

    asyncio.run(talk())


def test_options_arrive_as_they_were() -> None:
    odd = Path(os.fsdecode(b"/keys/\xff.txt"))  # not UTF-8
    options = ServeOptions(
        packages=(Path("a.pt2"),), listen=ListenOptions(api_keys=odd, receivers=2), drain_seconds=1.5
    )
    setup = Setup(options, 512, ("/",))
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
