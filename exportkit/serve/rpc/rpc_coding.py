"""Status codes, texts and compression, as gRPC has them on HTTP/2."""

from __future__ import annotations

import base64
import binascii
import zlib

from exportkit.serve.statuses import BadRequestError

_NAMES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED "
    "RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS "
    "UNAUTHENTICATED"
)
CODES = {name: number for number, name in enumerate(_NAMES.split(" "))}
"""The number of each status."""

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
# A status travels in trailing headers, for which clients reserve 8 KiB: a longer one arrives as another error. There, a
# byte that is not printable ASCII takes three.
_MAX_DETAILS = 2000


class MessageTooLargeError(Exception):
    """A message is larger than any model takes."""


class TooMuchHeldError(Exception):
    """As many bytes of messages wait as may."""


class UnreadableError(Exception):
    """A message is not compressed as it says."""


def encoded_details(text: str) -> str:
    """Returns a status's text as headers can have it, not longer than clients take."""
    details = text.encode()
    if len(details) > _MAX_DETAILS:
        details = details[:_MAX_DETAILS].decode(errors="ignore").encode() + b"..."
    return "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != 0x25 else f"%{byte:02X}" for byte in details)


def inflated(message: bytes | bytearray, encoding: str, most: int) -> bytes:
    """Returns a message decompressed.

    Raises:
        MessageTooLargeError: It has more than `most` bytes. So many were inflated at the most.
        UnreadableError: It is not compressed so, or not complete.
    """
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        data = inflater.decompress(message, most + 1)
    except zlib.error as error:
        raise UnreadableError(f"a message is not {encoding}: {error}") from None
    if len(data) > most:
        raise MessageTooLargeError(f"a decompressed message has more than {most} bytes, the most of any model")
    if not inflater.eof or inflater.unused_data:
        raise UnreadableError(f"a message of {encoding} is not complete, or more than one")
    return data


def plain_field(name: bytes, value: bytes) -> tuple[str, str | bytes]:
    """Returns a field as a call's metadata."""
    if not name.endswith(b"-bin"):
        return name.decode("latin-1"), value.decode("latin-1")
    try:
        return name.decode("latin-1"), base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise BadRequestError(f"the metadata {name.decode('latin-1')[:100]} is not base64") from None
