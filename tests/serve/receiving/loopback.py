"""A receiver and the process that it receives for, in one event loop: the messages are real, the processes are not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.http_options import HttpOptions
from exportkit.serve.receiving.answering import Answering
from exportkit.serve.receiving.body_memory import BodyMemory, MappedMemory, new_memory
from exportkit.serve.receiving.forwarding import receiver_app
from exportkit.serve.receiving.receiver_messages import Counted, FromReceiver, Message, ToReceiver, decoder, encode
from exportkit.serve.receiving.remote_models import RemoteModels

BYTES = 1 << 30


class Loopback:
    """Both sides. Made in the event loop that uses it.

    Attributes:
        memory: The receiver's memory of bodies.
        models: What the receiver asks.
        answering: What answers it.
        counted: What the receiver counted.
        said: Every message.
    """

    def __init__(self, repository: Any, options: HttpOptions | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        descriptor = new_memory(BYTES)
        self.memory, mapped = BodyMemory(descriptor, BYTES), MappedMemory(descriptor, BYTES)
        self._descriptor = descriptor
        self.said: list[Message] = []
        self.counted: list[Counted] = []
        options = options or HttpOptions()
        to_receiver = self._sender(decoder(ToReceiver), lambda *said: self.models.received(*said))
        from_receiver = self._sender(decoder(FromReceiver), lambda *said: self.answering.received(*said))
        self.models = RemoteModels(from_receiver, self.memory)
        self.answering = Answering(repository, make_app(repository, options), mapped, to_receiver, self.counted.append)

    def _sender(self, decode: Any, received: Callable[..., None]) -> Callable[..., None]:
        def send(message: Message, behind: Iterable[memoryview] = ()) -> None:
            self.said.append(message)
            payload = b"".join(bytes(part) for part in behind)
            self._loop.call_soon(received, decode.decode(encode(message)), memoryview(payload))

        return send

    def close(self) -> None:
        os.close(self._descriptor)


class LoopbackApp:
    """The application of a receiver, in whatever event loop it is called."""

    def __init__(self, repository: Any, options: HttpOptions | None = None) -> None:
        self._repository = repository
        self._options = options or HttpOptions()
        self._made: dict[asyncio.AbstractEventLoop, tuple[Loopback, Any]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            pair = Loopback(self._repository, self._options)
            options = HttpOptions(
                idle_seconds=self._options.idle_seconds,
                least_rate=self._options.least_rate,
                linger_seconds=self._options.linger_seconds,
                allocate=pair.memory.allocate,
            )
            self._made[loop] = pair, receiver_app(pair.models, options)
        await self._made[loop][1](scope, receive, send)
