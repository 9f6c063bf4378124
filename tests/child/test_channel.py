"""Whatever the other process does, a channel ends in a message, a ConnectionError, a TimeoutError or a ValueError."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.child.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the plain socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


@given(st.lists(st.binary(max_size=300_000), max_size=4))
def test_messages_arrive_whole_and_in_order(bodies: list[bytes]) -> None:
    one, other = (Channel(end) for end in socket.socketpair())
    sender = threading.Thread(target=lambda: [one.send(body) for body in bodies])
    sender.start()
    assert [other.receive() for _ in bodies] == [(body, []) for body in bodies]
    sender.join()
    one.close()
    other.close()


def test_a_file_comes_open_and_closes_itself_in_a_new_program(ends, tmp_path) -> None:
    channel, theirs = ends
    (tmp_path / "file").write_text("content")
    with open(tmp_path / "file") as file:
        Channel(theirs).send(b"here", [file.fileno()])
    body, (received,) = channel.receive()
    assert body == b"here"
    assert not os.get_inheritable(received)
    with open(received) as file:
        assert file.read() == "content"


@pytest.mark.parametrize("sent", [b"", b"\0\0", struct.pack("!I", 5) + b"abc"])
def test_an_end_in_the_middle_of_a_message_is_a_connection_error(ends, sent) -> None:
    channel, theirs = ends
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        channel.receive()


def test_a_message_of_gigabytes_is_refused_before_it_is_read(ends) -> None:
    channel, theirs = ends
    theirs.sendall(struct.pack("!I", 0xFFFFFFFF))
    with pytest.raises(ValueError, match="a message of 4294967295 bytes"):
        channel.receive()


def test_a_message_that_comes_a_byte_at_a_time_does_not_outlast_the_deadline(ends) -> None:
    channel, theirs = ends
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall(struct.pack("!I", 1000))
        while not stop.wait(0.02):
            theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    channel.deadline = time.monotonic() + 0.3
    with pytest.raises(TimeoutError):
        channel.receive()
    stop.set()
    thread.join()


def test_a_process_that_does_not_read_does_not_hold_up_the_sender(ends) -> None:
    channel, _ = ends
    channel.deadline = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        channel.send(bytes(8 << 20))


def test_without_a_deadline_an_answer_may_take_its_time_again(ends) -> None:
    channel, theirs = ends
    channel.deadline = time.monotonic() + 0.01
    with pytest.raises(TimeoutError):
        channel.receive()
    channel.deadline = None
    threading.Timer(0.2, lambda: Channel(theirs).send(b"late")).start()
    assert channel.receive() == (b"late", [])
