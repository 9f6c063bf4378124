"""Writes the answer to an inference, and sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from starlette.types import Send

from exportkit.serve.http.content_coding import Coding, deflated
from exportkit.serve.http.exchange import JSON
from exportkit.serve.protocol.answer_body import encode_answer
from exportkit.serve.protocol.inference import InferAnswer
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.protocol.tensors import LONG

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SMALL = 64 << 10  # bytes up to which the parts of an answer are put together, which costs less than sending each
_SENT_AT_ONCE = 1 << 20  # bytes that a transport may have to copy if the client takes them slowly


@dataclass(frozen=True)
class EncodedAnswer:
    """An answer as it is sent.

    Attributes:
        headers: What they say about the body.
        parts: The body in parts.
    """

    headers: list[tuple[bytes, bytes]]
    parts: list[bytes | memoryview]


async def encoded_answer(answer: InferAnswer, forms: OutputForms, coding: Coding | None) -> EncodedAnswer:
    """Writes an answer, compressed if `coding` says so. Raises what `encode_answer` raises."""
    as_text = [
        output.data.nbytes for output in answer.outputs if coding is not None or not forms.of(output.name).binary
    ]
    return await maybe_in_thread(sum(as_text), _encoded, answer, forms, coding)


def _encoded(answer: InferAnswer, forms: OutputForms, coding: Coding | None) -> EncodedAnswer:
    json_length, parts = encode_answer(answer, forms)
    headers = [JSON]
    if json_length is not None:
        headers = [(b"content-type", b"application/octet-stream")]
        headers.append((b"inference-header-content-length", b"%d" % json_length))
    if coding is not None:
        headers.append((b"content-encoding", coding.encode()))
        parts = list(deflated(parts, coding))
    size = sum([memoryview(part).nbytes for part in parts])
    headers.append((b"content-length", b"%d" % size))
    return EncodedAnswer(headers, parts if size > _SMALL else [b"".join(parts)])


async def send_answer(send: Send, answer: EncodedAnswer) -> None:
    """Sends an answer piece by piece, each once the client took most of those before."""
    await send({"type": "http.response.start", "status": 200, "headers": answer.headers})
    for part in answer.parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _SENT_AT_ONCE):
            await send({"type": "http.response.body", "body": view[start : start + _SENT_AT_ONCE], "more_body": True})
    await send({"type": "http.response.body"})


async def maybe_in_thread(work: int, do: Callable[[*Ts], T], *args: *Ts) -> T:
    """Reads a request or writes an answer, in another thread if that is much work, in the unit of LONG."""
    if work < LONG:
        return do(*args)
    return await asyncio.get_running_loop().run_in_executor(None, do, *args)
