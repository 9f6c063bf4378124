"""Writes the answer to an inference, and sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from starlette.types import Scope, Send

from exportkit.serve.http.content_coding import coding_of_answer, deflated
from exportkit.serve.http.exchange import JSON, headers_of
from exportkit.serve.protocol.answer_body import encode_answer
from exportkit.serve.protocol.inference import InferAnswer
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.protocol.tensors import LONG

T = TypeVar("T")

BINARY = (b"content-type", b"application/octet-stream")
SMALL = 64 << 10
"""Bytes up to which parts of an answer are put together, which costs less than sending each."""

_SENT_AT_ONCE = 1 << 20  # bytes that a transport may have to copy if the client takes them slowly


class EncodedAnswer(NamedTuple):
    """The body of an answer.

    Attributes:
        json_length: The length of its JSON, for the header Inference-Header-Content-Length; None: all is JSON.
        parts: The body in parts.
    """

    json_length: int | None
    parts: list[bytes | memoryview]

    @property
    def size(self) -> int:
        """The bytes of the body."""
        return sum([memoryview(part).nbytes for part in self.parts])


def work_of(answer: InferAnswer, forms: OutputForms) -> int:
    """Returns the work of writing an answer, in the unit of LONG."""
    return sum(0 if forms.of(output.name).binary else output.data.nbytes for output in answer.outputs)


async def encoded_answer(answer: InferAnswer, forms: OutputForms) -> EncodedAnswer:
    """Writes an answer. Raises what `encode_answer` raises."""
    write = partial(encode_answer, answer, forms)
    return EncodedAnswer(*await maybe_in_thread(work_of(answer, forms), write))


async def send_answer(send: Send, answer: EncodedAnswer, scope: Scope) -> None:
    """Sends an answer to a request, compressed if it says so."""
    accepted = headers_of(scope).get("accept-encoding")
    coding = None if scope["http_version"] == "1.0" else coding_of_answer(accepted)
    length = answer.json_length
    kind = [JSON] if length is None else [BINARY, (b"inference-header-content-length", b"%d" % length)]
    if coding is None:
        kind.append((b"content-length", b"%d" % answer.size))
        await _send(send, kind, _pieces(answer.parts), threaded=False)
    else:
        kind.append((b"content-encoding", coding.encode()))
        await _send(send, kind, deflated(_pieces(answer.parts), coding), threaded=True)


async def maybe_in_thread(work: int, do: Callable[[], T]) -> T:
    """Reads a request or writes an answer, in another thread if that is much work."""
    if work < LONG:
        return do()
    return await asyncio.get_running_loop().run_in_executor(None, do)


async def _send(
    send: Send, headers: list[tuple[bytes, bytes]], pieces: Iterator[bytes | memoryview], *, threaded: bool
) -> None:
    """Sends an answer piece by piece, each once the client took most of those before."""

    async def following() -> bytes | memoryview | None:
        if threaded:
            return await asyncio.get_running_loop().run_in_executor(None, next, pieces, None)
        return next(pieces, None)

    await send({"type": "http.response.start", "status": 200, "headers": headers})
    piece = await following()
    while piece is not None:
        after = await following()
        await send({"type": "http.response.body", "body": piece, "more_body": after is not None})
        piece = after


def _pieces(parts: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for large, group in groupby(parts, lambda part: memoryview(part).nbytes > SMALL):
        for part in group if large else [b"".join(group)]:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _SENT_AT_ONCE):
                yield view[start : start + _SENT_AT_ONCE]
