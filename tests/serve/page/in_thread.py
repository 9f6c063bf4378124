"""An application behind a real server, in a thread of the test's process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn


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
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Site(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
