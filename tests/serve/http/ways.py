"""The two ways to serve models over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exportkit.serve.http import asgi
from exportkit.serve.http.http_options import HttpOptions
from tests.serve.receiving.loopback import LoopbackApp

_way = "alone"


@contextmanager
def chosen(way: str) -> Iterator[None]:
    """Chooses what `make_app` makes."""
    global _way
    before, _way = _way, way
    yield
    _way = before


def make_app(repository: Any, options: HttpOptions, **more: Any) -> Any:
    """Returns the application of the server itself, or of a receiver, which has no shared memory and no more routes."""
    if _way == "alone" or more or options.shared_memory is not None:
        return asgi.make_app(repository, options, **more)
    return LoopbackApp(repository, options)
