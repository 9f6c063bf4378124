"""What the calls on a connection of HTTP/2 ask of it."""

from __future__ import annotations

from typing import Protocol, TypeVar

Stream = TypeVar("Stream")


class HeldBytes(Protocol):
    """What all connections hold together.

    Attributes:
        held: The bytes of messages that are not complete, or not wanted yet.
        max_held: The most of them.
        max_message: The most bytes of a message.
    """

    held: int
    max_held: int
    max_message: int


class StreamCarrier(Protocol[Stream]):
    """A connection, as its streams see it: `Http2Connection` says what its attributes are."""

    peer: str
    window: int
    most_frame: int
    paused: bool
    heard: float
    moved_bytes: int
    blocked: dict[Stream, None]

    @property
    def shared(self) -> HeldBytes:
        """What all connections have in common."""

    def write(self, part: bytes | memoryview, /) -> None:
        """Sends what is written in this turn of the loop together."""

    def flush_if_much(self) -> None:
        """Sends what was written if it is a lot."""

    def closed(self, stream: Stream, /, *, by_us: bool) -> None:
        """A call is over. `by_us`: what the client still sends of it is no error."""
