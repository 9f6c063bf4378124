"""Writes the body of an HTTP answer to an inference."""

from __future__ import annotations

from exportkit.serve.protocol.inference import InferAnswer
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.protocol.shared_memory import SharedMemory


def encode_answer(
    answer: InferAnswer, forms: OutputForms, shared_memory: SharedMemory | None = None
) -> tuple[int | None, list[bytes | memoryview]]:
    """Returns the length of the JSON and the parts of the body: the JSON, then each output's own memory.

    The length is for the header Inference-Header-Content-Length; None: all is JSON, and that header is not sent.
    Outputs that the request wants in shared memory are written there.

    Raises:
        BadRequestError: An output cannot be written as JSON (FP16, BF16, NaN, infinity), or does not fit its region.
    """
    raise NotImplementedError
