"""Answers `/v2/models/<model>[/versions/<version>]/infer`."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served_package import Named
from exportkit.serve.http.answer_sending import encoded_answer, maybe_in_thread, send_answer
from exportkit.serve.http.body_reader import BodyHead, read_body, too_large
from exportkit.serve.http.content_coding import coding_of_answer
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.http_request import BodyRules, parse_body
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStep
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import CancelledError, NotReadyError

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
