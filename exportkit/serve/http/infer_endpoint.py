"""Answers `/v2/models/<model>[/versions/<version>]/infer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

import msgspec
import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served_package import Named
from exportkit.serve.http.body_reader import BodyHead, read_body, too_large
from exportkit.serve.http.content_coding import Coding, coding_of_answer, deflated
from exportkit.serve.http.exchange import JSON, HttpOptions
from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.http_request import BodyRules, parse_body
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, OutputTensor, SequenceStep
from exportkit.serve.protocol.parameters import OutputForms, check_form
from exportkit.serve.protocol.tensors import LONG
from exportkit.serve.protocol.values import numpy_dtype
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import BadRequestError, CancelledError, NotReadyError

_JSON_BYTES = 64 << 10  # of names, shapes and parameters
_ELEMENT_TEXT = 26  # bytes of JSON for an element, at most: `-2.2250738585072014e-308, `


class InferEndpoint:
    """An ASGI application that answers inferences.

    It refuses a request before it reads the body, if it can. It receives the body into the memory that the model reads,
    and sends the outputs from where the model wrote them.
    """

    def __init__(self, repository: Repository, options: HttpOptions) -> None:
        self._repository = repository
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Raises:
            ServeError: The class says why. Nothing was sent.
        """
        record: RequestRecord = scope["exportkit"]
        wanted = scope["path_params"]
        head, coding = BodyHead.of(scope), coding_of_answer(Headers(scope=scope).get("accept-encoding"))
        model = self._repository.named(wanted["model"], wanted.get("version", ""))
        record.model, record.version = model.name, model.version
        limit = _limit_of(head, model.body_rules)
        with ExitStack() as room:
            room.enter_context(model.admit(head.size or 0))
            receiving = self._body(head, receive, model, limit, room)  # nothing here keeps the body
            forms, step, answer = await self._infer(head, await receiving, receive, model, record)
        record.timing = answer.timing
        try:
            encoded = await encoded_answer(answer, forms, coding)
        except BaseException:
            if step is not None:  # it changed the state, and its client does not have the answer
                model.cancel(step)
            raise
        del answer
        await send_answer(send, encoded)

    async def _body(self, head: BodyHead, receive: Receive, model: Named, limit: int, room: ExitStack) -> memoryview:
        """Receives the body, and makes room for what its headers do not say."""

        def reserve(size: int) -> None:
            with suppress(NotReadyError):  # what was accepted is answered, even if the server drains since
                room.enter_context(model.admit(size))

        return await read_body(receive, head, limit, self._options, reserve)

    async def _infer(
        self, head: BodyHead, body: memoryview, receive: Receive, model: Named, record: RequestRecord
    ) -> tuple[OutputForms, SequenceStep | None, InferAnswer]:
        """Reads the request and lets the model answer. The request's memory is free again when this returns."""
        length = body.nbytes if head.json_length is None else head.json_length
        parsed = await maybe_in_thread(length, parse_body, body, head.json_length, model.body_rules)
        del body
        request = parsed.request.owned_by(record.client)
        record.sequence = None if request.sequence is None else request.sequence.id
        record.model = parsed.model or record.model
        answer = await _while_connected(receive, model, request)
        return parsed.forms, request.sequence, answer


def _limit_of(head: BodyHead, rules: BodyRules) -> int:
    """Returns the most bytes that a body of the model can need. Raises TooLargeError for one that will be larger."""
    largest, elements = rules.largest
    text = _JSON_BYTES + _ELEMENT_TEXT * elements
    limit = text if head.json_length is None else largest + min(head.json_length, text)
    if (head.size or 0) > limit:
        raise too_large(limit)
    return limit


async def _while_connected(receive: Receive, model: Named, request: InferRequest) -> InferAnswer:
    """Lets the model answer. If the client goes away, the request leaves the queue before this returns."""
    answering: asyncio.Task[None] | None = asyncio.current_task()
    assert answering is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            continue
        gone = True
        answering.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await model.infer(request)
    except asyncio.CancelledError:
        if not gone:
            raise
        answering.uncancel()
        raise CancelledError("the client went away before its request was answered") from None
    finally:
        watching.cancel()


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


_ENCODER = msgspec.json.Encoder()


def encode_answer(answer: InferAnswer, forms: OutputForms) -> tuple[int | None, list[bytes | memoryview]]:
    """Returns the length of the JSON and the parts of the body: the JSON, then each output's own memory.

    The length is for the header Inference-Header-Content-Length; None: all is JSON, and that header is not sent.

    Raises:
        BadRequestError: An output cannot be written as JSON (FP16, BF16, NaN, infinity).
    """
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    for output in answer.outputs:
        form = forms.of(output.name)
        check_form(output.name, output.datatype, form)
        written: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if form.binary:
            written["parameters"] = {"binary_data_size": output.data.nbytes}
            binary.append(output.data)
        else:
            written["data"] = _values(output)
        outputs.append(written)
    named = {"id": answer.id} if answer.id else {}
    header = _ENCODER.encode({"model_name": answer.model, "model_version": answer.version, **named, "outputs": outputs})
    return (len(header) if binary else None), [header, *(data for data in binary if data.nbytes)]


def _values(output: OutputTensor) -> list[Any]:
    """Returns an output's elements in row-major order, as Triton writes them.

    Triton writes the literals NaN and Infinity. They are not JSON, and most readers then refuse the whole answer.
    """
    array = np.frombuffer(output.data, numpy_dtype(output.datatype))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadRequestError(
            f"the output {shown(output.name)} has NaN or infinity, which JSON cannot hold",
            hint="Ask for it with the parameter `binary_data`: true, or for all with `binary_data_output`: true.",
        )
    return array.tolist()
