"""Memory in which tensors start at multiples of 64 bytes, as torch's do."""

from __future__ import annotations

ALIGNMENT = 64


def aligned_bytes(size: int, start: int = 0) -> memoryview:
    """Returns `size` writable bytes without values, of which number `start` lies at a multiple of 64 bytes."""
    raise NotImplementedError


def body_buffer(content_length: int, header_length: int | None) -> memoryview:
    """Returns the memory into which a body is to be written, so that its binary section needs no copy.

    Args:
        content_length: The bytes of the body, decompressed.
        header_length: What `header_length_of` returned.

    Raises:
        BadRequestError: The header is longer than the body.
    """
    raise NotImplementedError
