"""Inferences over HTTP that are answered without a task and without ASGI, at a part of the cost.

Only what is plain goes this way: no API key, no state, tensors in binary form or a small body. Whatever else a request
is, or is refused for, is found out before anything was counted, and then the application answers it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from exportkit.serve.engine.asks import AskedRequest, Asks, KnownRequest
from exportkit.serve.engine.checked_request import CheckedRequest
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.http.answer_sending import SMALL, EncodedAnswer, encoded_answer, send_answer
from exportkit.serve.http.asgi import check_headers, check_origin, make_application
from exportkit.serve.http.body_reader import BodyClock, BodyHead, client_left
from exportkit.serve.http.content_coding import coding_of_answer
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.http.infer_endpoint import limit_of, unanswered
from exportkit.serve.operations.asgi_request import AsgiRequest
from exportkit.serve.operations.observation import Observation
from exportkit.serve.protocol.answer_body import encode_answer
from exportkit.serve.protocol.http_request import parse_body
from exportkit.serve.protocol.inference import InferAnswer, InferRequest
from exportkit.serve.protocol.parameters import OutputForms
from exportkit.serve.protocol.tensors import body_buffer
from exportkit.serve.request_record import RequestRecord, request_id
from exportkit.serve.statuses import BadRequestError, ServeError

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
        options: HttpOptions | None = None,
    ) -> None:
        """Begins.

        Args:
            repository: The models.
            observation: Sees every request.
            observe: Wraps an application that answers what cannot be answered at once, so that it is seen.
            draining: Whether every answer closes its connection.
            options: How slow bodies may come. Default: as everywhere.
        """
        self._repository = repository
        self._heads: dict[object, _Head | None] = {}
        self.observation = observation
        self.observe = observe
        self.draining = draining
        self.options = options or HttpOptions()

    def __call__(self, request: AsgiRequest) -> bool:
        """Answers a request whose head came. Returns False, and did nothing, if it has to go the long way."""
        head = self._head(request.scope)
        if head is None or request.disconnected:
            return False
        try:
            model = self._repository.named(head.model, head.version)
            if not isinstance(model, ServedModel) or (asks := model.asks) is None or not asks.has_room(head.size):
                return False
            limit_of(head.body, model.body_rules)
            asking = _Asking(self, request, head, model, asks)
            body = body_buffer(head.size, head.body.json_length)
            if not request.more_body:
                body[:] = request.body
                asking.ask(body)
                asking.taken()
            elif len(model.body_rules.methods) > 1:  # the JSON may name one that refuses it before its tensors come
                return False
            else:
                _Receiving(asking, body)
        except Exception:  # the long way says why, and counts it
            return False
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
    text = body.size if body.json_length is None else body.json_length
    if body.size is None or text is None or text > SMALL:
        return None
    if coding_of_answer(headers.get("accept-encoding")) is not None:
        return None
    return _Head(path[1], path[2] or "", headers, body, body.size)


class _Asking:
    """A plain request to a model."""

    def __init__(
        self, short: ShortInference, request: AsgiRequest, head: _Head, model: ServedModel, asks: Asks
    ) -> None:
        self.short, self.request, self.head, self.model, self.asks = short, request, head, model, asks
        self.record = RequestRecord()

    def ask(self, body: memoryview) -> None:
        """Asks the model. Raises, and did nothing, if the request has to go the long way."""
        head, record, version = self.head, self.record, self.model.version
        known = None if head.body.json_length is None else self.asks.known.get(bytes(body[: head.body.json_length]))
        if known is not None and (checked := known.inputs.of(body)) is not None:
            request, forms, name, _ = known
        else:
            request, forms, name, checked = self._read(body)
        answering = _Answering(self, request.id, forms)
        answering.asked = AskedRequest(self.asks, request, checked, head.size, answering.answered)
        record.model, record.version, record.received_bytes = name, version, head.size
        self.request.body = bytearray()
        self.request.watch(answering.left)

    def _read(self, body: memoryview) -> tuple[InferRequest, OutputForms, str, CheckedRequest]:
        """Reads a request, and remembers what others like it share."""
        model, length = self.model, self.head.body.json_length
        text = body[:length]
        parsed = parse_body(body, length, model.body_rules)
        asked = parsed.request
        if asked.sequence is not None or asked.method not in (None, model.method):
            raise BadRequestError("the request is not plain")
        checked = self.asks.plan.check(asked)
        request, name = replace(asked, inputs=()), parsed.model or model.name
        if length is not None:
            inputs = self.asks.plan.known_inputs(asked, checked, length, body.nbytes)
            if inputs is not None:
                self.asks.remember(bytes(text), KnownRequest(request, parsed.forms, name, inputs))
        return request, parsed.forms, name, checked

    def taken(self) -> None:
        """Nobody else answers the request, or counts it."""
        self.record.id = request_id(self.head.headers.get("x-request-id"))
        self.request.scope["exportkit"], self.request.scope["exportkit.headers"] = self.record, self.head.headers
        self.short.observation.in_flight += 1

    def over(self) -> None:
        """It was answered, or nobody wants the answer."""
        self.short.observation.in_flight -= 1
        self.short.observation.over(self.record, self.request.scope)

    def go_the_long_way(self, body: memoryview) -> None:
        """Lets the server's application answer after all. The whole body came."""
        self.short.observation.in_flight -= 1  # it is counted there, as the bytes are
        self.record.received_bytes = 0
        self.request.body = bytearray(body)
        self.request.go_on(None)

    def send_slowly(self, answer: InferAnswer, forms: OutputForms) -> None:
        """Lets an application send a large answer."""

        async def send_it(scope: Scope, _: Receive, send: Send) -> None:
            await send_answer(send, await encoded_answer(answer, forms), scope)

        self._let_answer(send_it)

    def refuse(self, error: Exception) -> None:
        """Lets an application send an error."""

        async def send_it(*_: object) -> None:
            raise error

        self._let_answer(send_it)

    def _let_answer(self, application: ASGIApp) -> None:
        self.short.observation.in_flight -= 1  # it is counted there
        self.request.go_on(self.short.observe(make_application(application, HttpOptions())))


class _Receiving:
    """A request whose body still comes into its memory. The queue has room for it."""

    def __init__(self, asking: _Asking, body: memoryview) -> None:
        asking.taken()
        asking.record.model, asking.record.version = asking.model.name, asking.model.version
        asking.asks.accepted.enter(asking.head.size)
        self._asking = asking
        self._body = body
        self._clock = BodyClock(asking.short.options, self._late)
        self._stop = asking.request.fill(body, self._came, self._ended)

    def _came(self, size: int) -> None:
        self._asking.record.received_bytes += size
        self._clock.received(size)

    def _ended(self, whole: bool) -> None:
        """Asks the model if the body is whole. Otherwise the client went away."""
        asking, body = self._asking, self._body
        self._over()
        if not whole:
            asking.refuse(client_left())
        else:
            try:
                asking.ask(body)
            except Exception:  # the long way says why, and counts it
                asking.go_the_long_way(body)
        asking.asks.accepted.leave(asking.head.size)

    def _late(self) -> None:
        asking, error = self._asking, self._clock.error()
        self._stop()
        self._over()
        asking.refuse(error)
        asking.asks.accepted.leave(asking.head.size)

    def _over(self) -> None:
        self._clock.end()
        del self._stop, self._body, self._clock  # which refer to this, and would keep the body's memory


class _Answering:
    """A request that waits for its answer."""

    asked: AskedRequest

    def __init__(self, asking: _Asking, name: str, forms: OutputForms) -> None:
        self._asking = asking
        self._id, self._forms = name, forms

    def left(self) -> None:
        """The client went away: the request leaves the queue."""
        self.asked.give_up()
        del self.asked  # which refers to this
        self._asking.record.failed(unanswered())
        self._asking.over()

    def answered(self, outcome: BatchResult | ServeError) -> None:
        """Sends the answer or the error."""
        del self.asked
        asking = self._asking
        asking.request.watch(None)
        if isinstance(outcome, ServeError):
            asking.refuse(outcome)
            return
        asking.record.timing = outcome.timing
        answer = InferAnswer(asking.model.name, asking.model.version, self._id, outcome.outputs, outcome.timing)
        if sum([output.data.nbytes for output in outcome.outputs]) > SMALL or not asking.request.can_reply:
            asking.send_slowly(answer, self._forms)
            return
        try:
            self._send(EncodedAnswer(*encode_answer(answer, self._forms)))
        except Exception as error:  # other requests of its batch wait for their answers
            asking.refuse(error)

    def _send(self, answer: EncodedAnswer) -> None:
        asking, record = self._asking, self._asking.record
        name, size, length = record.id.encode(), answer.size, answer.json_length
        lines = _JSON_LINE % (size, name) if length is None else _BINARY_LINES % (length, size, name)
        record.status, record.sent_bytes = 200, size
        asking.request.keep_alive &= not asking.short.draining()
        asking.request.reply(lines, answer.parts)
        asking.over()
