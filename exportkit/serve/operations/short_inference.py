"""Inferences over HTTP that are answered without a task and without ASGI, at a part of the cost.

Only what is plain goes this way: no API key, no state, a body that came whole and is small. Whatever else a request is,
or is refused for, is found out before anything was counted, and then the application answers it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from exportkit.serve.engine.asks import AskedRequest
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.http.answer_sending import SMALL, EncodedAnswer, encoded_answer, send_answer
from exportkit.serve.http.asgi import check_headers, check_origin, make_application
from exportkit.serve.http.body_reader import BodyHead
from exportkit.serve.http.content_coding import coding_of_answer
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.http.infer_endpoint import limit_of, unanswered
from exportkit.serve.operations.asgi_request import AsgiRequest
from exportkit.serve.operations.observation import Observation
from exportkit.serve.protocol.answer_body import encode_answer
from exportkit.serve.protocol.http_request import ParsedBody, parse_body
from exportkit.serve.protocol.inference import InferAnswer
from exportkit.serve.protocol.tensors import body_buffer
from exportkit.serve.request_record import RequestRecord, request_id
from exportkit.serve.statuses import ServeError

_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_REMEMBERED, _REMEMBERED_BYTES = 256, 4096  # heads, and bytes of each at most
_JSON_LINE = b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
_BINARY_LINES = (
    b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
    b"content-length: %d\r\nx-request-id: %b\r\n"
)


@dataclass(frozen=True)
class _Head:
    """What the head of a plain request says: `headers` by lower-case name, and how long the body is."""

    model: str
    version: str
    headers: dict[str, str]
    body: BodyHead
    size: int


class ShortInference:
    """Answers plain inferences."""

    def __init__(
        self,
        repository: Repository,
        observation: Observation,
        observe: Callable[[ASGIApp], ASGIApp],
        draining: Callable[[], bool],
    ) -> None:
        """Begins.

        Args:
            repository: The models.
            observation: Sees every request.
            observe: Wraps an application that answers what cannot be answered at once, so that it is seen.
            draining: Whether every answer closes its connection.
        """
        self._repository = repository
        self._heads: dict[object, _Head | None] = {}
        self.observation = observation
        self.observe = observe
        self.draining = draining

    def __call__(self, request: AsgiRequest) -> bool:
        """Answers a request whose body came whole. Returns False, and did nothing, if it has to go the long way."""
        head = self._head(request.scope)
        if head is None or request.disconnected or len(request.body) != head.size:
            return False
        try:
            return self._begin(request, head)
        except Exception:  # the long way says why, and counts it
            return False

    def _begin(self, request: AsgiRequest, head: _Head) -> bool:
        record = RequestRecord()
        model = self._repository.named(head.model, head.version)
        if not isinstance(model, ServedModel) or (asks := model.asks) is None or not asks.has_room(head.size):
            return False
        limit_of(head.body, model.body_rules)
        body = body_buffer(head.size, head.body.json_length)
        body[:] = request.body
        parsed = parse_body(body, head.body.json_length, model.body_rules)
        asked = parsed.request
        if asked.sequence is not None or asked.method not in (None, model.method):
            return False
        record.id = request_id(head.headers.get("x-request-id"))
        record.model, record.version, record.received_bytes = parsed.model or model.name, model.version, head.size
        answering = _Answering(self, request, model, parsed, record)
        answering.asked = AskedRequest(asks, asked, head.size, answering.answered)
        request.scope["exportkit"], request.scope["exportkit.headers"] = record, head.headers
        self.observation.in_flight += 1
        request.body = bytearray()
        request.watch(answering.left)
        return True

    def _head(self, scope: Scope) -> _Head | None:
        """Returns what a head says; None: the request has to go the long way. Clients send the same head again."""
        key = scope["method"], scope["raw_path"], scope["http_version"], tuple(scope["headers"])
        try:
            return self._heads[key]
        except KeyError:
            head = _read_head(scope)
        if len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in key[3]) <= _REMEMBERED_BYTES:
            if len(self._heads) >= _REMEMBERED:
                self._heads.clear()
            self._heads[key] = head
        return head


def _read_head(scope: Scope) -> _Head | None:
    path = _PATH.fullmatch(scope["path"])
    if path is None or scope["method"] != "POST" or scope["http_version"] != "1.1":
        return None
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    try:
        check_headers(scope, headers)
        check_origin("POST", headers)
        body = BodyHead.of({**scope, "exportkit.headers": headers})
    except ServeError:
        return None
    if body.size is None or body.size > SMALL or coding_of_answer(headers.get("accept-encoding")) is not None:
        return None
    return _Head(path[1], path[2] or "", headers, body, body.size)


class _Answering:
    """A request that waits for its answer."""

    asked: AskedRequest

    def __init__(
        self, short: ShortInference, request: AsgiRequest, model: ServedModel, parsed: ParsedBody, record: RequestRecord
    ) -> None:
        self._short = short
        self._request = request
        self._model = model
        self._id, self._forms = parsed.request.id, parsed.forms
        self._record = record

    def left(self) -> None:
        """The client went away: the request leaves the queue."""
        self.asked.give_up()
        self._record.failed(unanswered())
        self._over()

    def answered(self, outcome: BatchResult | ServeError) -> None:
        """Sends the answer or the error."""
        self._request.watch(None)
        if isinstance(outcome, ServeError):
            self._slowly(outcome)
            return
        self._record.timing = outcome.timing
        answer = InferAnswer(self._model.name, self._model.version, self._id, outcome.outputs, outcome.timing)
        if sum(output.data.nbytes for output in outcome.outputs) > SMALL or not self._request.can_reply:
            self._slowly(answer)
            return
        try:
            self._send(EncodedAnswer(*encode_answer(answer, self._forms)))
        except Exception as error:  # other requests of its batch wait for their answers
            self._slowly(error)

    def _send(self, answer: EncodedAnswer) -> None:
        body, name = b"".join(answer.parts), self._record.id.encode()
        size, length = len(body), answer.json_length
        lines = _JSON_LINE % (size, name) if length is None else _BINARY_LINES % (length, size, name)
        self._record.status, self._record.sent_bytes = 200, size
        self._request.keep_alive &= not self._short.draining()
        self._request.reply(lines, body)
        self._over()

    def _over(self) -> None:
        self._short.observation.in_flight -= 1
        self._short.observation.over(self._record, self._request.scope)

    def _slowly(self, outcome: InferAnswer | Exception) -> None:
        """Lets an application send a large answer or an error."""

        async def answer(scope: Scope, _: Receive, send: Send) -> None:
            if isinstance(outcome, Exception):
                raise outcome
            await send_answer(send, await encoded_answer(outcome, self._forms, None), scope)

        self._short.observation.in_flight -= 1  # it is counted there
        self._request.go_on(self._short.observe(make_application(answer, HttpOptions())))
