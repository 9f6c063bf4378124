"""Requests that are no inferences: the process that has the models answers them."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from exportkit.serve.http.body_reader import BodyHead, read_body
from exportkit.serve.http.body_source import BodySource
from exportkit.serve.http.exchange import headers_of
from exportkit.serve.http.http_options import HttpOptions
from exportkit.serve.http.json_routes import LARGEST_BODY
from exportkit.serve.receiving.remote_models import RemoteModels
from exportkit.serve.request_record import RequestRecord

_SCOPE = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client", "server")
_OF_THE_BODY = (b"content-length", b"content-encoding", b"transfer-encoding")
_OURS = b"x-request-id"  # which each answer gets here


class Forwarding:
    """An ASGI application that lets the other process answer."""

    def __init__(self, models: RemoteModels, options: HttpOptions) -> None:
        self._models = models
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises a ServeError if its body is refused."""
        head = BodyHead.of(headers_of(scope))
        source = BodySource.of(scope, receive)
        body = await read_body(source, head, LARGEST_BODY, self._options, lambda size: None)
        record: RequestRecord = scope["exportkit"]
        headers = [field for field in scope["headers"] if field[0] not in _OF_THE_BODY]
        headers.append((b"content-length", b"%d" % body.nbytes))
        about = {name: scope[name] for name in _SCOPE}
        answer, answer_body = await self._models.forward(about, headers, record.id, body)
        record.error = answer.failure
        fields = [field for field in answer.headers if field[0] != _OURS]
        await send({"type": "http.response.start", "status": answer.status, "headers": fields})
        await send({"type": "http.response.body", "body": bytes(answer_body)})
