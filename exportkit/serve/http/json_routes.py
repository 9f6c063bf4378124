"""The URLs whose requests and answers are small JSON: health, metadata, statistics, the repository, shared memory."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from exportkit.serve.http.body_reader import read_small_body
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.queries import Queries
from exportkit.serve.statuses import BadRequestError, NotOfferedError, NotReadyError

if TYPE_CHECKING:  # these import torch, which a receiver must not load
    from exportkit.serve.engine.repository import Repository
    from exportkit.serve.engine.served import ServedModel

Answer = Callable[[Request], Awaitable[Any]]


class JsonRoutes:
    """The small requests. Each method returns what its answer's JSON is made of, or raises a ServeError."""

    def __init__(self, repository: Repository, options: HttpOptions) -> None:
        self._repository = repository
        self._queries = Queries(repository, options.shared_memory)
        self._options = options

    def routes(self) -> list[Route]:
        """Returns the routes. The first that fits is taken."""
        found = [
            _route("/v2/health/live", self.live),
            _route("/v2/health/ready", self.ready),
            _route("/v2", self.server_metadata),
            _route("/v2/models/stats", self.statistics),
            _route("/v2/repository/index", self.index, "POST"),
            _route("/v2/repository/models/{model}/load", self.load, "POST"),
            _route("/v2/repository/models/{model}/unload", self.unload, "POST"),
            _route("/v2/logging", self.no_logging, "GET", "POST"),
            _route("/v2/trace/setting", self.no_traces, "GET", "POST"),
            _route("/v2/models/{model}/trace/setting", self.no_traces, "GET", "POST"),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found += [
                _route(model, self.model_metadata),
                _route(f"{model}/ready", self.model_ready),
                _route(f"{model}/config", self.model_config),
                _route(f"{model}/stats", self.statistics),
            ]
        for memory in ("/v2/systemsharedmemory", "/v2/systemsharedmemory/region/{region}"):
            found += [
                _route(f"{memory}/status", self.memory_status),
                _route(f"{memory}/unregister", self.memory_unregister, "POST"),
            ]
        found.append(_route("/v2/systemsharedmemory/region/{region}/register", self.memory_register, "POST"))
        found.append(_route("/v2/cudasharedmemory/{rest:path}", self.no_cuda_memory, "GET", "POST"))
        return found

    # --- the server ---------------------------------------------------------------------------------------------------

    async def live(self, _: Request) -> Any:
        """The process answers. That stays so while models are loaded, and while the server drains."""
        return {"live": True}

    async def ready(self, _: Request) -> Any:
        """Every model answers."""
        if self._repository.ready:
            return {"ready": True}
        raise NotReadyError("the server drains" if self._repository.draining else "not every model is ready")

    async def server_metadata(self, _: Request) -> Any:
        """The server's name, version and extensions."""
        return self._queries.server_metadata("binary_tensor_data")

    async def no_logging(self, _: Request) -> Any:
        """Triton's log settings."""
        raise NotOfferedError(
            "log settings cannot be read or changed while the server runs", hint="`exportkit serve --help` has them."
        )

    async def no_traces(self, _: Request) -> Any:
        """Triton's trace settings."""
        raise NotOfferedError(
            "trace settings cannot be read or changed while the server runs", hint="`exportkit serve --help` has them."
        )

    # --- models -------------------------------------------------------------------------------------------------------

    async def model_metadata(self, request: Request) -> Any:
        """A model's inputs and outputs."""
        return self._model(request).metadata()

    async def model_config(self, request: Request) -> Any:
        """A model's configuration, as Triton has it."""
        return self._model(request).config()

    async def model_ready(self, request: Request) -> Any:
        """The model answers."""
        model = self._model(request)
        if not model.ready:
            raise NotReadyError(f"the model {model.name} is not ready")
        return {"name": model.name, "ready": True}

    async def statistics(self, request: Request) -> Any:
        """What was counted of a version, of all versions of a model, or of all models."""
        asked = request.path_params
        return self._queries.statistics(asked.get("model", ""), asked.get("version", ""))

    def _model(self, request: Request) -> ServedModel:
        return self._repository.model(request.path_params["model"], request.path_params.get("version", ""))

    # --- the repository -----------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> Any:
        """The models that there are; with `ready`, those that answer."""
        only_ready = (await self._json(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise BadRequestError("`ready` is neither true nor false")
        return self._queries.index(only_ready)

    async def load(self, request: Request) -> Any:
        """Loads a model."""
        parameters = (await self._json(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise BadRequestError("`parameters` is not a JSON object")
        return await self._queries.load(request.path_params["model"], parameters)

    async def unload(self, request: Request) -> Any:
        """Unloads a model. No model depends on another, so `unload_dependents` changes nothing."""
        await self._json(request)
        return await self._queries.unload(request.path_params["model"])

    # --- shared memory ------------------------------------------------------------------------------------------------

    async def memory_status(self, request: Request) -> Any:
        """The regions that clients registered."""
        return self._queries.memory.status(request.path_params.get("region", ""))

    async def memory_register(self, request: Request) -> Any:
        """Registers a region."""
        memory = self._queries.memory
        memory.register_body(
            request.path_params["region"], await read_small_body(request.scope, request.receive, self._options)
        )
        return {}

    async def memory_unregister(self, request: Request) -> Any:
        """Forgets a region, or all."""
        self._queries.memory.unregister(request.path_params.get("region", ""))
        return {}

    async def no_cuda_memory(self, _: Request) -> Any:
        """Memory of a GPU that a client shares."""
        raise NotOfferedError(
            "this server does not offer CUDA shared memory",
            hint="Send the tensors, or use system shared memory: `exportkit serve --shared-memory`.",
        )

    # --- bodies -------------------------------------------------------------------------------------------------------

    async def _body(self, request: Request) -> memoryview:
        return await read_small_body(request.scope, request.receive, self._options)

    async def _json(self, request: Request) -> dict[str, Any]:
        """Returns the body's JSON object; without a body, an empty one."""
        body = await self._body(request)
        try:
            value = msgspec.json.decode(body) if body else {}
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise BadRequestError("the body is not a JSON object")
        return value


def _route(path: str, answer: Answer, *methods: str) -> Route:
    @functools.wraps(answer)
    async def respond(request: Request) -> Response:
        return Response(msgspec.json.encode(await answer(request)), media_type="application/json")

    return Route(path, respond, methods=list(methods or ("GET",)))
