"""The two ways to serve models over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from exportkit.serve.http import asgi
from exportkit.serve.http.exchange import HttpOptions
from tests.serve.receiving.loopback import LoopbackApp

ALONE = pytest.mark.parametrize("way", ["alone"], indirect=True, scope="session")
"""For what receivers do not offer, such as shared memory, and for what is not about the way in."""

_way = "alone"


@contextmanager
def chosen(way: str) -> Iterator[None]:
    """Chooses what `make_app` makes."""
    global _way
    before, _way = _way, way
    yield
    _way = before


def make_app(repository: Any, options: HttpOptions, **more: Any) -> Any:
    """Returns the application of the server itself, or of a receiver. `more` is for either."""
    make = asgi.make_app if _way == "alone" else LoopbackApp
    return make(repository, options, **more)
