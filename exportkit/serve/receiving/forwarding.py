"""The application of a receiver: inferences are read and written here, everything else is forwarded."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from exportkit.serve.http.asgi import Middleware, infer_routes, make_application
from exportkit.serve.http.body_reader import read_small_body
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.receiving.remote_models import RemoteModels, sendable
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.statuses import CancelledError

SCOPE = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client", "server")
_OF_THE_BODY = (b"content-length", b"content-encoding", b"transfer-encoding")
_OURS = b"x-request-id"  # which each answer gets here


def receiver_app(models: RemoteModels, options: HttpOptions, middleware: Sequence[Middleware] = ()) -> ASGIApp:
    """Returns the application of a receiver.

    Args:
        models: The models of the other process.
        options: As for `make_app`.
        middleware: As for `make_app`.
    """
    router = Router(infer_routes(models.open, options), redirect_slashes=False, default=Forwarding(models, options))
    return make_application(router, options, middleware)


class Forwarding:
    """An ASGI application that lets the other process answer."""

    def __init__(self, models: RemoteModels, options: HttpOptions) -> None:
        self._models = models
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises a ServeError if its body is refused."""
        body = await read_small_body(scope, receive, self._options)
        record: RequestRecord = scope["exportkit"]
        headers = [field for field in scope["headers"] if field[0] not in _OF_THE_BODY]
        headers.append((b"content-length", b"%d" % body.nbytes))
        about = {**{name: scope[name] for name in SCOPE}, "path": sendable(scope["path"])}
        answer, answer_body = await self._models.forward(about, headers, record, body)
        record.error = answer.failure
        fields = [field for field in answer.headers if field[0] != _OURS]
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": fields})
            await send({"type": "http.response.body", "body": bytes(answer_body)})
        except CancelledError:
            if record.error is None:  # a refusal that nobody waits for stays a refusal
                raise
