"""Reads the body of an HTTP request for an inference: JSON, JSON before binary data, or one tensor's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.protocol.shared_memory import SharedMemory


@dataclass(frozen=True)
class ParsedBody:
    """A request, and how its answer is to be written."""

    request: InferRequest
    forms: OutputForms


def header_length_of(value: str | None) -> int | None:
    """Returns the number in the HTTP header Inference-Header-Content-Length. None: there is no such header.

    Raises:
        BadRequestError: It is not a number of at most 18 digits.
    """
    raise NotImplementedError


def parse_body(
    body: memoryview,
    header_length: int | None,
    *,
    metadata: Mapping[str, Any],
    batched: bool,
    shared_memory: SharedMemory | None = None,
) -> ParsedBody:
    """Reads a body. The inputs are views of it, so it must not be written to again.

    Args:
        body: The whole body, decompressed; best in a `body_buffer`.
        header_length: The length of the JSON. None: all is JSON. 0: all is the one input's data.
        metadata: `ServedModel.metadata()`, which gives the input of a request without JSON, and the outputs' datatypes.
        batched: Whether the first size of the inputs is a number of rows: then a request without JSON has one row,
            unless no other size varies.
        shared_memory: The registered regions. None: this server does not offer shared memory.

    Raises:
        BadRequestError: The body breaks the protocol. The message names the key or the input.
        NotOfferedError: It asks for a part of the protocol that is not offered.
    """
    raise NotImplementedError
