"""The server as an application of Ray Serve: `import_path: exportkit.deployment.ray_app:app`.

A replica is the HTTP application with an engine and its batcher. Ray places the replicas, sends them requests, replaces
those that die, and changes their number. deploy/ray has a configuration for `serve deploy`; docs/scale.md explains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exportkit.errors import UsageError
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.servable import check_packages
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.process_settings import shorten_switch_interval
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import ListenOptions, ServeOptions
from exportkit.serve.statuses import NotOfferedError

NAME = "exportkit"  # of the deployment, and of the application that `exportkit serve --ray` makes

_REFUSED = {
    "listen": "Ray listens: http_options in its configuration, and TLS and keys in what stands in front of it",
    "access_log": "Ray writes an access log: logging_config in its configuration",
    "traces": "Ray exports traces: tracing_config in its configuration",
    "sequences": "a step may reach another replica than the one with its state; docs/scale.md says where they go",
}


def app(args: dict[str, Any]) -> serve.Application:
    """Builds the application, for `serve deploy` and `serve run`.

    Args:
        args: `packages`, `repository`, `load`, `batch` and `drain_seconds` of ServeOptions, as nested mappings. Paths
            must exist on every node. Methods with state are not served.

    Raises:
        UsageError: A key is unknown, has a wrong value, or is Ray's business.
    """
    return application(options_of(args))


def application(options: ServeOptions, replica: serve.Deployment | None = None) -> serve.Application:
    """Returns the application with these options. Ray's configuration may replace every setting of the deployment.

    Packages that are here are looked at, so that one without a method that can be served is refused before Ray starts.

    Args:
        options: What to serve.
        replica: The deployment. Default: `Replica`.

    Raises:
        UsageError: An option is Ray's business, or no method of a package can be served.
        PackageError: A package is bad, or lacks a required signature.
    """
    check_options(options)
    options = dataclasses.replace(options, sequences=SequenceLimits(most=0))
    check_packages([path for path in options.packages if path.exists()], options.load.public_keys, sequences=False)
    gpus = sum(device.startswith("cuda") for device in options.load.devices)
    chosen: Any = replica or Replica  # a Deployment, by the decorator
    deployment = chosen.options(
        graceful_shutdown_timeout_s=options.drain_seconds,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
    )
    return deployment.bind(options)


def options_of(args: Mapping[str, Any]) -> ServeOptions:
    """Reads the options of a configuration.

    Raises:
        UsageError: A key is unknown, or has a wrong value.
    """
    _check_keys(ServeOptions, args, "args")
    try:
        return msgspec.convert(args, ServeOptions, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise UsageError(f"the arguments of the application cannot be read: {error}") from error


def check_options(options: ServeOptions) -> None:
    """Refuses what a replica cannot do.

    Raises:
        UsageError: An option is Ray's business.
    """
    ours = dataclasses.replace(options.listen, host=ListenOptions.host, port=ListenOptions.port)
    ours = dataclasses.replace(ours, grpc_port=ListenOptions.grpc_port)
    plain = dataclasses.replace(options, listen=ours)
    for name, reason in _REFUSED.items():
        if getattr(plain, name) != getattr(ServeOptions(), name):
            raise UsageError(f"on Ray, {name} cannot be set: {reason}")
    if not options.packages and options.repository is None:
        raise UsageError("nothing to serve", hint="Give packages or a repository.")


def _check_keys(kind: type, given: Any, where: str) -> None:
    if not isinstance(given, Mapping):
        return  # msgspec says what is wrong
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(given) - set(known)):
        raise UsageError(f"{where} has the unknown key {unknown[0]!r}", hint=f"Known are {', '.join(known)}.")
    for name, value in given.items():
        default = known[name].default_factory
        if isinstance(default, type):
            _check_keys(default, value, f"{where}.{name}")


@serve.deployment(
    name=NAME,
    # The replica's own limits count rows and bytes. This one only keeps memory bounded if a client ignores 429.
    max_ongoing_requests=256,
    max_queued_requests=1024,
    backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16},
    health_check_period_s=5,
)
@serve.ingress()
class Replica:
    """One engine. Ray calls everything here in the replica's event loop."""

    async def __init__(self, options: ServeOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        """Loads and warms up the models. Ray sends requests afterwards."""
        shorten_switch_interval()
        self._repository = Repository(options)
        await self._repository.open()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns what answers requests."""
        return _InReplica(make_app(self._repository, HttpOptions(), middleware=(_one_of_many,)), self._repository)

    async def check_health(self) -> None:
        """Raises if a model is lost. Ray then replaces the replica."""
        for model in self._repository.models():
            if not model.ready:
                raise RuntimeError(f"the model {model.name} is not ready")


def _one_of_many(inner: ASGIApp) -> ASGIApp:
    """Refuses to change the models of the one replica that a request reached."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v2/repository/models/"):
            raise NotOfferedError(
                "a request cannot load or unload models on Ray: it reaches one replica of several",
                hint="Change args of the application, and run `serve deploy`.",
            )
        await inner(scope, receive, send)

    return guarded


class _InReplica:
    """Drains the models when Ray ends the replica, which it does after the last request or its time limit.

    Ray's own proxy, to which HAProxy falls back, pickles what a replica sends; memory that is lent cannot be pickled.
    """

    def __init__(self, inner: ASGIApp, repository: Repository) -> None:
        self._inner = inner
        self._repository = repository

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (kind := (await receive())["type"]) != "lifespan.shutdown":
                await send({"type": f"{kind}.complete"})
            await self._repository.drain()
            return await send({"type": "lifespan.shutdown.complete"})

        async def owned(message: Message) -> None:
            if isinstance(message.get("body"), memoryview):
                message = {**message, "body": bytes(message["body"])}
            await send(message)

        await self._inner(scope, receive, owned)
