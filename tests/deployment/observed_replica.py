"""A replica whose requests are written down, so that a test knows what was in flight where. Replicas import it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exportkit.deployment import ray_app

JOURNAL = "EXPORTKIT_TEST_JOURNAL"  # the environment variable that names the file
SECONDS = 0.05  # a request takes at least so long, so that some are in flight whenever a process is killed

_Replica: Any = ray_app.Replica.func_or_class


class ObservedReplica(_Replica):
    """Writes a line `begin|end PROCESS REQUEST` for each inference."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _observed(super().__serve_build_asgi_app__())


def app(args: dict[str, Any]) -> Any:
    """Builds the application, as ray_app.app does."""
    observed: Any = ray_app.Replica.options(func_or_class=ObservedReplica)
    return ray_app.application(ray_app.options_of(args), observed)


def _observed(inner: ASGIApp) -> ASGIApp:
    journal = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND)

    def write(event: str, request: str) -> None:
        os.write(journal, f"{event} {os.getpid()} {request}\n".encode())  # survives the process

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("path", "").endswith("/infer"):
            return await inner(scope, receive, send)
        request = dict(scope["headers"]).get(b"x-test-request", b"-").decode()
        write("begin", request)
        await asyncio.sleep(SECONDS)

        async def sent(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                write("end", request)

        await inner(scope, receive, sent)

    return observed


class Journal:
    """The lines that the replicas write from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size

    def lines(self) -> list[tuple[str, int, str]]:
        """Returns (begin or end, process, request)."""
        with self._path.open() as file:
            file.seek(self._start)
            split = [line.split() for line in file if line.endswith("\n")]
        return [(event, int(process), request) for event, process, request in split]

    def living(self) -> set[int]:
        """Returns the processes that began a request and still run."""
        return {process for _, process, _ in self.lines() if Path("/proc", str(process)).exists()}

    def in_flight(self, process: int) -> set[str]:
        """Returns the requests that a process began and did not answer."""
        begun = {request for event, where, request in self.lines() if (event, where) == ("begin", process)}
        return begun - {request for event, where, request in self.lines() if (event, where) == ("end", process)}
