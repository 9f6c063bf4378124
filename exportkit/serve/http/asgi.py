"""The ASGI application."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from exportkit.serve.engine.repository import Repository
from exportkit.serve.http.body_reader import read_small_body
from exportkit.serve.http.exchange import Exchange, HttpOptions
from exportkit.serve.http.infer_endpoint import InferEndpoint
from exportkit.serve.queries import Queries
from exportkit.serve.statuses import (
    BadRequestError,
    ForbiddenError,
    MethodNotAllowedError,
    NotOfferedError,
    NotReadyError,
    NotServedError,
    ServeError,
)

Answer = Callable[[Request], Any]
"""Returns what the JSON of an answer is made of, or what to await for it. Raises a ServeError."""


class JsonRoutes:
    """The small requests."""

    def __init__(self, repository: Repository, options: HttpOptions) -> None:
        self._repository = repository
        self._options = options
        self._queries = Queries(repository)

    def routes(self) -> list[Route]:
        """Returns the routes. The first that fits is taken."""
        queries, model, versions = self._queries, "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        found = [
            # That stays so while models are loaded, and while the server drains.
            _route("/v2/health/live", self._live),
            _route("/v2/health/ready", self._ready),
            _route("/v2", lambda request: queries.server_metadata("binary_tensor_data")),
            _route("/v2/models/stats", self._statistics),
            _route("/v2/repository/index", self._index, "POST"),
            _route("/v2/repository/models/{model}/load", self._load, "POST"),
            _route("/v2/repository/models/{model}/unload", self._unload, "POST"),
            _route("/v2/logging", _no_settings("log"), "GET", "POST"),
            _route("/v2/trace/setting", _no_settings("trace"), "GET", "POST"),
            _route(f"{model}/trace/setting", _no_settings("trace"), "GET", "POST"),
            _route("/v2/systemsharedmemory/{rest:path}", _no_shared_memory, "GET", "POST"),
            _route("/v2/cudasharedmemory/{rest:path}", _no_shared_memory, "GET", "POST"),
        ]
        for path in (model, versions):
            found += [
                _route(path, lambda request: queries.metadata(*_named(request))),
                _route(f"{path}/ready", self._model_ready),
                _route(f"{path}/config", lambda request: queries.config(*_named(request))),
                _route(f"{path}/stats", self._statistics),
            ]
        return found

    def _live(self, _: Request) -> Any:
        if (lost := self._repository.lost) is not None:
            raise NotReadyError(lost)
        return {"live": True}

    def _ready(self, _: Request) -> Any:
        if self._repository.ready:
            return {"ready": True}
        raise NotReadyError("the server drains" if self._repository.draining else "not every model is ready")

    def _model_ready(self, request: Request) -> Any:
        model = self._repository.named(*_named(request))
        if not model.ready:
            raise NotReadyError(f"the model {model.name} is not ready")
        return {"name": model.name, "ready": True}

    def _statistics(self, request: Request) -> Any:
        return self._queries.statistics(*_named(request))

    async def _index(self, request: Request) -> Any:
        only_ready = (await self._json(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise BadRequestError("`ready` is neither true nor false")
        return self._queries.index(only_ready)

    async def _load(self, request: Request) -> Any:
        parameters = (await self._json(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise BadRequestError("`parameters` is not a JSON object")
        return await self._queries.load(request.path_params["model"], parameters)

    async def _unload(self, request: Request) -> Any:
        await self._json(request)  # no model depends on another, so `unload_dependents` changes nothing
        return await self._queries.unload(request.path_params["model"])

    async def _json(self, request: Request) -> dict[str, Any]:
        """Returns the body's JSON object; without a body, an empty one."""
        body = await read_small_body(request.scope, request.receive, self._options)
        try:
            value = msgspec.json.decode(body) if body else {}
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise BadRequestError("the body is not a JSON object")
        return value


def _named(request: Request) -> tuple[str, str]:
    """Returns the model and the version that the path names. Empty: all are meant, or the newest."""
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _no_settings(kind: str) -> Answer:
    """Refuses to read or change Triton's settings."""

    def refuse(_: Request) -> Any:
        raise NotOfferedError(
            f"{kind} settings cannot be read or changed while the server runs",
            hint="`exportkit serve --help` has them.",
        )

    return refuse


def _no_shared_memory(_: Request) -> Any:
    raise NotOfferedError(
        "this server does not offer shared memory", hint="Send the tensors. Triton's server has shared memory."
    )


def _route(path: str, answer: Answer, *methods: str) -> Route:
    async def respond(request: Request) -> Response:
        answered = answer(request)
        if inspect.isawaitable(answered):
            answered = await answered
        return Response(msgspec.json.encode(answered), media_type="application/json")

    return Route(path, respond, methods=list(methods or ("GET",)))


Middleware = Callable[[ASGIApp], ASGIApp]

_INFER = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
_SHOWN = 200  # characters of a URL in a message
_ONCE = ("authorization", "host", "origin", "sec-fetch-site", "content-encoding", "inference-header-content-length")

_log = logging.getLogger(__name__)


def make_app(
    repository: Repository,
    options: HttpOptions,
    *,
    routes: Sequence[BaseRoute] = (),
    middleware: Sequence[Middleware] = (),
) -> ASGIApp:
    """Returns the application that serves a repository. It needs no server in particular, and no lifespan events.

    Args:
        repository: What is served. The caller opens and drains it.
        options: How clients are treated.
        routes: Further URLs. Each ServeError and each HTTPException that they raise becomes the protocol's JSON.
        middleware: ASGI applications around the routes, the outermost first. They find the request's RequestRecord in
            `scope["exportkit"]`, and may refuse the request by raising a ServeError before they begin an answer. What
            is to see refusals as they are sent wraps the application that is returned here.
    """
    infer = InferEndpoint(repository, options)
    inferences = [Route(path, infer, methods=["POST"]) for path in _INFER]
    router = Router([*inferences, *JsonRoutes(repository, options).routes(), *routes], redirect_slashes=False)
    app: ASGIApp = router
    for wrap in reversed(middleware):
        app = wrap(app)
    return _Application(app, router)


class _Application:
    """Turns whatever goes wrong inside into the protocol's JSON."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # lifespan events, and websockets, which it refuses
            await self._router(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        scope["app"] = self  # so that Starlette's routes raise their refusals
        scope["path"] = scope["path"].rstrip("/") or "/"
        headers: Mapping[str, str] | None = None
        try:
            _check_once(exchange.headers)
            _check_upgrade(exchange.headers)
            _check_origin(scope["method"], exchange.headers)
            await self._app(scope, exchange.receive, exchange.send)
            return
        except ServeError as error:
            refusal = _without_frames(error)
        except HTTPException as error:
            refusal, headers = _of_starlette(error, scope), error.headers
        except Exception as error:
            _log.exception("request %s: %s %s failed", exchange.record.id, scope["method"], scope["path"][:_SHOWN])
            text = f"the server failed ({type(error).__name__})"
            refusal = ServeError(text, hint="Its log says why, by the x-request-id.")
        await exchange.refuse(refusal, headers)


def _without_frames(error: ServeError) -> ServeError:
    """Returns an error that does not keep the request's body alive while the refusal is sent."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _check_once(headers: Headers) -> None:
    """Refuses two headers of one name, of which a proxy could have checked the other one."""
    for name in _ONCE:
        if (count := len(headers.getlist(name))) > 1:
            raise BadRequestError(f"the request has the header {name} {count} times", hint="Send one.")


def _check_upgrade(headers: Mapping[str, str]) -> None:
    """Refuses a body before another protocol: the server's parser takes it for the other protocol."""
    if "upgrade" in headers and ("transfer-encoding" in headers or headers.get("content-length", "0") != "0"):
        raise BadRequestError(
            "a request with a body offers another protocol",
            hint="Send no header Upgrade. Java's HttpClient sends none with `version(HTTP_1_1)`.",
        )


def _check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Refuses changes that a web page of another origin asks for. Its browser reaches even what listens on loopback.

    Browsers send Sec-Fetch-Site to loopback and over TLS only. Origin they send with each request but GET and HEAD. A
    proxy may have changed Host, so a browser that says `same-origin` is believed: no page can make it say so.
    """
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    if method in ("GET", "HEAD") or site == "same-origin":
        return
    place = None if origin is None else origin.partition("://")[2].lower()
    if site != "none" or (place is not None and (not place or place != headers.get("host", "").lower())):
        raise ForbiddenError(
            "this server takes no requests from web pages of other origins",
            hint="The header Origin has to name the host and the port of the header Host.",
        )


def _of_starlette(error: HTTPException, scope: Scope) -> ServeError:
    url = f"{scope['method']} {scope['path'][:_SHOWN]}"
    if error.status_code == 404:
        return NotServedError(f"there is nothing at {url}", hint="`GET /v2` describes this server.")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowedError(f"{url} is not allowed", hint=f"The URL takes {allowed}.")
    if error.status_code < 500:
        return BadRequestError(error.detail)
    return ServeError(error.detail)
