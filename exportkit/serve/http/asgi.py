"""The ASGI application."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from exportkit.serve.engine.repository import Repository
from exportkit.serve.http.exchange import Exchange, HttpOptions
from exportkit.serve.http.infer_endpoint import InferEndpoint
from exportkit.serve.http.json_routes import JsonRoutes
from exportkit.serve.statuses import (
    BadRequestError,
    ForbiddenError,
    MethodNotAllowedError,
    NotServedError,
    ServeError,
)

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
