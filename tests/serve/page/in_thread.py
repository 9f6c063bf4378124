"""An application behind a real server, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exportkit.serve.engine.repository import Repository
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.listeners import open_port
from exportkit.serve.operations.http_server import HttpServer
from exportkit.serve.page.page_routes import page_routes
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import ServeOptions


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # by lower-case names
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Site:
    """Where a server listens."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> Reply:
        """Asks for a path as it is written, which a URL library would not."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request(method, path, headers=headers or {})
            reply = connection.getresponse()
            return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())


@asynccontextmanager
async def _listening(opened: AbstractAsyncContextManager[Any]) -> AsyncIterator[Site]:
    """Serves an ASGI application in the caller's event loop."""
    async with opened as application:
        server = HttpServer(application, max_connections=1024, tls=None)
        sockets = open_port("127.0.0.1", 0, "--port")
        port = sockets[0].getsockname()[1]
        await server.listen(sockets)
        yield Site(port)
        await server.finish()


@contextmanager
def served(application: Any) -> Iterator[Site]:
    """Serves an ASGI application until the context is left."""
    with _in_thread(nullcontext(application)) as site:
        yield site


@contextmanager
def served_packages(*packages: Path, around: Callable[[Any], Any] = lambda application: application) -> Iterator[Site]:
    """Serves packages and the page until the context is left. `around` wraps the application."""
    options = ServeOptions(packages, sequences=SequenceLimits(finish_seconds=0))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        repository = Repository(options)
        await repository.open()
        yield around(make_app(repository, HttpOptions(), routes=page_routes(repository)))
        await repository.drain()

    with _in_thread(opened()) as site:
        yield site


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _in_thread(opened: AbstractAsyncContextManager[Any]) -> Iterator[Site]:
    listening = _listening(opened)
    with loop_thread() as loop:
        site = asyncio.run_coroutine_threadsafe(listening.__aenter__(), loop).result()
        try:
            yield site
        finally:
            asyncio.run_coroutine_threadsafe(listening.__aexit__(None, None, None), loop).result()
