"""Messages with tensors between processes: what is sent is what arrives, and what is no message does no harm."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from exportkit.runtime.tensor_socket import TensorSocket


class Note(Struct, frozen=True, tag=True):
    text: str


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, TensorSocket[Note]]]:
    """An end that says what the test wants, and the one that has to cope."""
    one, other = socket.socketpair()
    listening = TensorSocket[Note](other, Note)
    yield one, listening
    one.close()
    listening.close()


def framed(message: object) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def place(offset: int = 0, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "offset": offset}


def frame(*places: dict[str, object]) -> bytes:
    return framed({"message": {"type": "Note", "text": ""}, "tensors": places})


def memory(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_views_of_any_strides_arrive_contiguous(raw):
    """Contiguous ones are what workers get and answer with: test_requests.py has them, of every dtype."""
    said, heard = raw
    base = torch.randn(6, 4, dtype=torch.complex64)
    tensors = [base.T, base[::2, 1:3], base.expand(3, 6, 4), base.conj(), base.imag, base.real.requires_grad_()]
    TensorSocket(said, Note).send(Note("words"), tensors)
    note, received, passed = heard.receive()
    assert (note.text, passed) == ("words", None)
    for got, sent in zip(received, tensors, strict=True):
        assert got.is_contiguous()
        assert not got.requires_grad
        assert not got.is_conj()
        assert torch.equal(got, sent)


@pytest.mark.parametrize(
    ("data", "seals", "said"),
    [
        (framed(b"no JSON"), None, "malformed"),
        (framed({"message": {"type": "Note", "text": ""}}), None, "missing required field `tensors`"),
        (framed({"message": {"type": "Other"}, "tensors": []}), None, "Invalid value 'Other'"),
        (frame(place(dtype="no_dtype")), None, "no_dtype"),
        (frame(place(dtype="Tensor")), None, "Tensor"),
        (frame(place(shape=(-1,))), None, ">= 0"),
        (frame(place(offset=-64)), None, ">= 0"),
        (frame(place(shape=(2**31, 2**31, 2**31))), None, "invalid message"),
        (frame(place()), None, "invalid message"),  # of memory that never came
        (frame(place(offset=1)), fcntl.F_SEAL_SHRINK, "invalid message"),  # no alignment for float32
        (frame(place(offset=4096)), fcntl.F_SEAL_SHRINK, "a tensor that ends at byte 4112 of 4096"),
        # Whoever reads beyond the end of a file that was cut off dies of SIGBUS.
        (frame(place()), fcntl.F_SEAL_GROW, "could be shrunk"),
    ],
)
def test_what_is_no_message_is_refused(raw, data, seals, said):
    sender, heard = raw
    before = open_files()
    if seals is None:
        sender.sendall(data)
    else:
        socket.send_fds(sender, [data], [fd := memory(4096, seals)])
        os.close(fd)
    with pytest.raises(ValueError, match=said):
        heard.receive()
    heard.close()
    assert open_files() == before - 1  # its own end


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_and_no_crash(data):
    said, heard = socket.socketpair()
    with said, heard:
        said.sendall(data)
        said.close()
        with pytest.raises((ValueError, ConnectionError)):
            TensorSocket[Note](heard, Note).receive()


def test_what_we_share_cannot_be_cut_off_by_the_other_side(raw):
    said, heard = raw
    heard.send(Note(""), [torch.ones(10)])
    _, (fd,), _, _ = socket.recv_fds(said, 1000, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
