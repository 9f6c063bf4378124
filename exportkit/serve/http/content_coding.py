"""The content codings gzip and deflate (a zlib stream): inflates what clients send, deflates what they ask for."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Literal, cast

from exportkit.serve.statuses import BadRequestError, UnknownEncodingError

Coding = Literal["gzip", "deflate"]

PIECE = 256 << 10  # bytes that are inflated at once, however well they were compressed
_WINDOW = {"gzip": 31, "deflate": 15}
_LEVEL = 1  # tensors hardly get smaller at higher levels, which take many times as long


def coding_of_body(value: str | None) -> Coding | None:
    """Returns how the header Content-Encoding says that a body is compressed.

    Raises:
        UnknownEncodingError: It is neither gzip nor deflate, or several.
    """
    name = (value or "identity").strip().lower()
    if name in _WINDOW:
        return cast(Coding, name)
    if name == "identity":
        return None
    raise UnknownEncodingError(
        f"the body has the content encoding `{name[:80]}`", hint="This server reads gzip, deflate and identity."
    )


def coding_of_answer(value: str | None) -> Coding | None:
    """Returns how an answer is to be compressed by the header Accept-Encoding.

    Tensors are long and hardly shrink, so only a client that names one coding and nothing else gets it. A list of
    codings is what HTTP libraries send without being asked.
    """
    name = (value or "").strip().lower()
    return cast(Coding, name) if name in _WINDOW else None


class Inflater:
    """Inflates a body as it arrives."""

    def __init__(self, coding: Coding) -> None:
        """Nothing has arrived yet."""
        self._coding = coding
        self._stream = zlib.decompressobj(_WINDOW[coding])

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields what the next bytes of the body inflate to, at most `PIECE` bytes at a time.

        Raises:
            BadRequestError: They are not what the coding allows.
        """
        piece = b""
        # A full piece may have left bytes inside of the stream.
        while data or (len(piece) == PIECE and not self._stream.eof):
            if self._stream.eof:
                raise BadRequestError(f"the body goes on after the end of its {self._coding} data")
            try:
                piece = self._stream.decompress(data, PIECE)
            except zlib.error as error:
                raise BadRequestError(f"the body is not {self._coding} data: {error}") from error
            yield piece
            data = self._stream.unconsumed_tail or self._stream.unused_data

    def end(self) -> None:
        """The body is complete.

        Raises:
            BadRequestError: The compressed data is not.
        """
        if not self._stream.eof:
            raise BadRequestError(f"the body ends in the middle of its {self._coding} data")


def deflated(parts: Iterable[bytes | memoryview], coding: Coding) -> Iterator[bytes]:
    """Yields the parts of an answer, compressed."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[coding])
    for part in parts:
        if piece := stream.compress(part):
            yield piece
    yield stream.flush()
