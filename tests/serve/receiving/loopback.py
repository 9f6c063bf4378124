"""A receiver and the process that it receives for, in one event loop: the messages are real, the processes are not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.receiving.body_memory import BodyMemory, MappedMemory, new_body_memory
from exportkit.serve.receiving.forwarding import receiver_app
from exportkit.serve.receiving.receiver_messages import (
    Counted,
    FromReceiver,
    ReceiverMessage,
    ToReceiver,
    decoder,
    encode,
)
from exportkit.serve.receiving.receiver_session import ReceiverSession
from exportkit.serve.receiving.remote_models import RemoteModels

BYTES = 1 << 30


class Loopback:
    """Both sides. Made in the event loop that uses it.

    Attributes:
        memory: The receiver's memory of bodies.
        models: What the receiver asks.
        session: What answers it.
        counted: What the receiver counted.
        said: Every message.
    """

    def __init__(self, repository: Any, *, routes: Sequence[Any] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        descriptor = new_body_memory(BYTES)
        self.memory, mapped = BodyMemory(descriptor), MappedMemory(descriptor)
        self._descriptor = descriptor
        self.said: list[ReceiverMessage] = []
        self.counted: list[Counted] = []
        application = make_app(repository, HttpOptions(), routes=routes)
        to_receiver = self._sender(decoder(ToReceiver), lambda *said: self.models.received(*said))
        from_receiver = self._sender(decoder(FromReceiver), lambda *said: self.session.received(*said))
        self.models = RemoteModels(from_receiver, self.memory)
        self.session = ReceiverSession(repository, application, mapped, to_receiver, self.counted.append)

    def _sender(self, decode: Any, received: Callable[..., None]) -> Callable[..., None]:
        def send(message: ReceiverMessage, behind: Iterable[memoryview] = ()) -> None:
            self.said.append(message)
            payload = b"".join(bytes(part) for part in behind)
            self._loop.call_soon(received, decode.decode(encode(message)), memoryview(payload))

        return send

    def close(self) -> None:
        os.close(self._descriptor)


class LoopbackApp:
    """The application of a receiver, in whatever event loop it is called.

    Attributes:
        said: Every message.
        calls: The requests to all receivers' applications.
    """

    calls = 0

    def __init__(
        self, repository: Any, options: HttpOptions, *, routes: Sequence[Any] = (), middleware: Sequence[Any] = ()
    ) -> None:
        assert options.shared_memory is None, "a receiver cannot read the memory of clients"
        self._repository = repository
        self._options = options
        self._routes, self._middleware = routes, middleware
        self._made: dict[asyncio.AbstractEventLoop, Any] = {}
        self.said: list[ReceiverMessage] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        LoopbackApp.calls += 1
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            pair = Loopback(self._repository, routes=self._routes)
            pair.said = self.said
            options = replace(self._options, allocate=pair.memory.allocate)
            self._made[loop] = receiver_app(pair.models, options, self._middleware)
        await self._made[loop](scope, receive, send)
