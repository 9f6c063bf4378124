"""`exportkit serve --ray`: runs the application of ray_app until SIGTERM or SIGINT."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exportkit.errors import HostError
from exportkit.serve.serve_options import ServeOptions


def run_on_ray(options: ServeOptions, *, started: Callable[[str], None]) -> None:
    """Serves on the cluster that RAY_ADDRESS names, or on a new one of this machine. Must be called in the main thread.

    With RAY_SERVE_ENABLE_HA_PROXY=1, Ray's HAProxy brings a body to the replica without a copy in Python. Then the
    replicas and HAProxy's statistics (ports 8404 and 9101) listen on every interface.

    Args:
        options: What to serve. Of `listen`, only `host` and `port` are used.
        started: Is called with the URL when the replicas are ready.

    Raises:
        HostError: Ray is not installed.
        UsageError: An option is Ray's business, or there is nothing to serve.
        PackageError: A package is bad, or lacks a required signature.
    """
    options = _absolute(options)
    try:
        import ray
        from ray import serve

        from exportkit.deployment.ray_app import NAME, application
    except ImportError as error:
        raise HostError(f"cannot serve on Ray: {error}", hint="`pip install 'exportkit[serve,ray]'`.") from error
    made = application(options)
    local = not os.environ.get("RAY_ADDRESS")
    where: dict[str, Any] = {"address": "local", "include_dashboard": False} if local else {}
    ray.init(log_to_driver=False, configure_logging=False, **where)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which has its own
        signal.signal(number, lambda *_: ended.set())
    try:
        serve.start(http_options={"host": options.listen.host, "port": options.listen.port})
        serve.run(made, name=NAME)
        started(f"http://{options.listen.host}:{options.listen.port}")
        ended.wait()
    finally:
        serve.delete(NAME)  # drains
        ray.shutdown()  # ends the cluster, if it was made here


def _absolute(options: ServeOptions) -> ServeOptions:
    """Returns the options with paths that mean the same in every process of this machine."""
    keys = tuple(Path(key).resolve() for key in options.load.public_keys)
    return dataclasses.replace(
        options,
        packages=tuple(package.resolve() for package in options.packages),
        repository=options.repository and options.repository.resolve(),
        load=dataclasses.replace(options.load, public_keys=keys),
    )
