"""What the tests of the server share: they may be coroutines, and ask echo models over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from tests.serve.echo_models import EchoRepository, repository
from tests.serve.page.in_thread import Site, loop_thread
from tests.serve.page.in_thread import served as served_over_http
from tests.serve.rpc.echo import Seen, Served, served

SECONDS = 500  # a test that would wait for ever fails


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), SECONDS))
    return True


@pytest.fixture
def models() -> EchoRepository:
    return repository()


@pytest.fixture
def app(models: EchoRepository) -> Any:
    """An application for single requests."""
    return make_app(models, HttpOptions())


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A server that many tests share."""
    with served_over_http(make_app(repository(), HttpOptions())) as site:
        yield site


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of every server of gRPC, in a thread: grpc.aio has one loop in a process."""
    with loop_thread() as loop:
        yield loop


@pytest.fixture
def seen() -> Seen:
    """The records of the server `echo`."""
    return Seen()


@pytest.fixture
def echo(loop: asyncio.AbstractEventLoop, seen: Seen) -> Iterator[Served]:
    """A server of one echo model over gRPC, which refuses a key."""
    with served(loop, observe=seen, allow=lambda given: given != b"wrong") as opened:
        yield opened


@pytest.fixture
def channel(echo: Served) -> Iterator[grpc.Channel]:
    """A connection to it."""
    with grpc.insecure_channel(echo.address, [("grpc.max_receive_message_length", -1)]) as channel:
        yield channel
