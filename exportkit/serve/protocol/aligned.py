"""Memory in which tensors start at multiples of 64 bytes, as torch's do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from exportkit.serve.statuses import BadRequestError

# torch's CPU allocator aligns to this. An operator may have relied on it in every recorded case.
ALIGNMENT = 64


def aligned_bytes(size: int, start: int = 0) -> memoryview:
    """Returns `size` writable bytes without values, of which number `start` lies at a multiple of 64 bytes."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    skipped = -(_address(memory) + start) % ALIGNMENT
    return memory.data[skipped : skipped + size]


def aligned(data: memoryview) -> memoryview:
    """Returns `data`, or a copy of it if it does not start at a multiple of 64 bytes."""
    if not data.nbytes or _address(np.frombuffer(data, np.uint8)) % ALIGNMENT == 0:
        return data
    copy = aligned_bytes(data.nbytes)
    copy[:] = data
    return copy


def body_buffer(
    content_length: int, header_length: int | None, allocate: Callable[[int, int], memoryview] = aligned_bytes
) -> memoryview:
    """Returns the memory into which a body is to be written, so that its binary section needs no copy.

    Args:
        content_length: The bytes of the body, decompressed.
        header_length: What `header_length_of` returned.
        allocate: Makes the memory as `aligned_bytes` does.

    Raises:
        BadRequestError: The header is longer than the body.
    """
    check_header_length(content_length, header_length)
    return allocate(content_length, header_length or 0)


def check_header_length(content_length: int, header_length: int | None) -> None:
    """Raises BadRequestError if the JSON cannot be that long."""
    if header_length is not None and header_length > content_length:
        raise BadRequestError(
            f"the header Inference-Header-Content-Length is {header_length}, and the body has {content_length} bytes",
            hint="It is the length of the JSON, which is at most the length of the (decompressed) body.",
        )


def _address(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])
