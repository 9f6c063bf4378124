"""Sends messages with tensors to another process: JSON through a Unix socket, tensors through shared memory.

Nothing is pickled. Each side writes its tensors into its own memory, which the other side maps once and reuses for
later messages. The memory is an anonymous file (memfd). It has no name that could be left behind, takes no room in
/dev/shm, which is small in many containers, and ends with the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct

from exportkit.child.channel import Channel

_ALIGNMENT = 64  # bytes, the same as for torch's own tensors
_GRANULARITY = 1 << 20  # bytes, so that slightly larger tensors fit the same memory
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Message = TypeVar("Message")
Count = Annotated[int, Meta(ge=0)]


class _Place(Struct, frozen=True):
    """The place of a contiguous tensor in the sender's memory."""

    dtype: str
    shape: tuple[Count, ...]
    offset: Count

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class _Frame(Struct, Generic[Message], frozen=True):
    message: Message
    tensors: tuple[_Place, ...]


class TensorSocket(Generic[Message]):
    """One end of a conversation in which the sides take turns.

    Received tensors are views of the other side's memory. They are valid until the next message is sent.
    """

    def __init__(self, connection: socket.socket, messages: Any) -> None:
        """Takes over a connected Unix stream socket. It receives messages of a type that msgspec can decode."""
        self._channel = Channel(connection)
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Frame[messages])
        self._ours: _Memory | None = None
        self._theirs: _Memory | None = None

    def send(self, message: Struct, tensors: Sequence[torch.Tensor] = (), *, pass_fd: int | None = None) -> None:
        """Sends a message, a copy of each tensor, and optionally an open file.

        ConnectionError: the other side is gone. OSError: there is no memory for the tensors.
        """
        with contextlib.ExitStack() as stack:
            fds = [] if pass_fd is None else [pass_fd]
            places, size = _lay_out(tensors)
            ours = self._ours
            if size and (ours is None or size > ours.size):
                fds.append(fd := _new_memory(-(-size // _GRANULARITY) * _GRANULARITY))
                stack.callback(os.close, fd)
                ours = _Memory(fd)
            with torch.no_grad():
                for place, tensor in zip(places, tensors):
                    if ours is not None:  # else all are empty
                        ours.tensor(place).copy_(tensor)
            self._ours = ours
            self._channel.send(self._encoder.encode(_Frame(message, places)), fds)

    def receive(self) -> tuple[Message, list[torch.Tensor], int | None]:
        """Returns the next message, its tensors, and the open file that came with it.

        Raises:
            ConnectionError: The other side closed its end or died.
            ValueError: The message is invalid.
        """
        body, fds = self._channel.receive()
        try:
            frame = self._decoder.decode(body)
            needed = max((place.end for place in frame.tensors), default=0)
            if needed and (self._theirs is None or needed > self._theirs.size):
                self._theirs = _Memory(fds[-1])
                os.close(fds.pop())
                if needed > self._theirs.size:
                    raise ValueError(f"a tensor that ends at byte {needed} of {self._theirs.size}")
            tensors = [self._theirs.tensor(place) if self._theirs else _empty(place) for place in frame.tensors]
            return frame.message, tensors, fds.pop() if fds else None
        except (msgspec.DecodeError, LookupError, RuntimeError) as error:
            raise ValueError(f"invalid message: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Closes the socket and the memory. The other side notices unless a forked process still has the socket."""
        self._channel.close()
        self._ours = self._theirs = None


class _Memory:
    """Mapped shared memory. Its tensors keep it alive."""

    def __init__(self, fd: int) -> None:
        """Maps an open memfd, which may then be closed. Refuses one whose end could go: reading it would kill us."""
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the shared memory could be shrunk")
        self.size = os.fstat(fd).st_size
        self._bytes = torch.frombuffer(mmap.mmap(fd, self.size), dtype=torch.uint8)

    def tensor(self, place: _Place) -> torch.Tensor:
        if place.end == place.offset:
            return _empty(place)
        return self._bytes[place.offset : place.end].view(_DTYPES[place.dtype]).view(place.shape)


def _new_memory(size: int) -> int:
    """Opens a memfd that keeps its size. Missing memory is an OSError here, not a SIGBUS in a later write."""
    fd = os.memfd_create("exportkit-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _lay_out(tensors: Sequence[torch.Tensor]) -> tuple[tuple[_Place, ...], int]:
    """Returns the place of each tensor, and the bytes they take together."""
    places, end = [], 0
    for tensor in tensors:
        dtype, start = str(tensor.dtype).removeprefix("torch."), -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(_Place(dtype, tuple(tensor.shape), start))
        end = places[-1].end
    return tuple(places), end


def _empty(place: _Place) -> torch.Tensor:
    return torch.empty(place.shape, dtype=_DTYPES[place.dtype])
