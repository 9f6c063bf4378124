"""An application behind a real server, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from exportkit.serve.engine.repository import Repository
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.page.page_routes import page_routes
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            reply = connection.getresponse()
            named = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, named, reply.read())
        finally:
            connection.close()


@contextmanager
def served(application: Any) -> Iterator[Site]:
    """Serves an ASGI application until the context is left."""
    with _in_thread(lambda: nullcontext(application)) as site:
        yield site


@contextmanager
def served_packages(*packages: Path, around: Callable[[Any], Any] = lambda application: application) -> Iterator[Site]:
    """Serves packages and the page until the context is left. `around` wraps the application."""
    options = ServeOptions(packages)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        repository = Repository(options)
        await repository.open()
        yield around(make_app(repository, HttpOptions(), routes=page_routes(repository, options)))
        await repository.drain()

    with _in_thread(opened) as site:
        yield site


@contextmanager
def _in_thread(opened: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[Site]:
    listening: Future[Site] = Future()
    stop: list[Callable[[], None]] = []

    async def serve() -> None:
        async with opened() as application:
            server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
            stop.append(lambda: setattr(server, "should_exit", True))
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                listening.set_result(Site(listener.getsockname()[1]))
                await server.serve(sockets=[listener])

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            listening.set_exception(error)  # a test that waits fails with it

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listening.result()
    finally:
        for each in stop:
            each()
        thread.join()
