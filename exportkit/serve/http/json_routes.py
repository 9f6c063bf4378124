"""The URLs whose requests and answers are small JSON: health, metadata, statistics, the repository."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from exportkit.serve.engine.repository import Repository
from exportkit.serve.http.body_reader import read_small_body
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.queries import Queries
from exportkit.serve.statuses import BadRequestError, NotOfferedError, NotReadyError

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
