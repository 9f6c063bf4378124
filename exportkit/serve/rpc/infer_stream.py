"""One ModelStreamInfer: its requests run together, and are answered in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.message_classes import message_class
from exportkit.serve.rpc.rpc_calls import Observe, RpcCall
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.rpc.wire import field_head
from exportkit.serve.statuses import ServeError

_STREAMED = message_class("inference.ModelStreamInferResponse")

MOST_REQUESTS = 256  # of a stream that wait or run, as many as a client without streams may well send
_MOST_UNSENT = 1 << 20  # bytes of answers that wait for a client before its next request runs

Infer = Callable[[Message, float | None, RequestRecord], Awaitable[bytes]]
"""Answers a request, which must be there within so many seconds, and writes into its record. Raises a ServeError."""


class InferStream:
    """The requests of one call, each in a task. They begin in their order, and so do the steps of a sequence."""

    def __init__(self, infer: Infer, observe: Observe | None, call: RpcCall) -> None:
        """`run` answers them. `observe` gets each when it is over."""
        self._infer = infer
        self._observe = observe
        self._call = call
        self._stream = call.stream
        self._loop = asyncio.get_running_loop()
        self._order: deque[asyncio.Task[bytes]] = deque()
        self._unread: deque[Message] = deque()
        self._last_came = False
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Returns when the last request is answered. What a request raises that is no ServeError ends the stream."""
        self._stream.drained = self._go_on
        try:
            self._stream.consume(self._take)
            await self._over
        finally:
            self._stream.drained = None
            tasks, self._order = self._order, deque()
            self._unread.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self) -> None:
        """Ends the stream once the requests that came are answered: the server ends, and the client may never do."""
        self._last_came = True
        self._end_if_done()

    def _take(self, message: Message | None) -> None:
        if message is None:
            self._last_came = True
            self._end_if_done()
        elif not self._unread and self._may_begin:
            self._begin(message)
        else:
            self._unread.append(message)
            self._stream.hold(len(message))

    @property
    def _may_begin(self) -> bool:
        return len(self._order) < MOST_REQUESTS and self._stream.unsent < _MOST_UNSENT

    def _begin(self, message: Message) -> None:
        record = self._call.new_record()
        record.received_bytes = len(message)
        self._call.record.received_bytes += len(message)
        task = self._loop.create_task(self._answered(message, record))
        self._order.append(task)
        task.add_done_callback(self._send)

    async def _answered(self, message: Message, record: RequestRecord) -> bytes:
        """Returns the stream's message with the answer to a request, or with its error."""
        inference = self._infer(message, self._call.seconds_left, record)
        del message  # while the request waits, its inputs are in memory once
        try:
            with self._call.recorded(record, self._observe):
                answer = await inference
                record.sent_bytes = len(answer)
            return field_head(_STREAMED.INFER_RESPONSE_FIELD_NUMBER, len(answer)) + answer
        except ServeError as error:
            return bytes(_STREAMED(error_message=error.text).SerializeToString())

    def _send(self, _: asyncio.Task[bytes]) -> None:
        """Sends what is the next in order."""
        while self._order and self._order[0].done():
            task = self._order.popleft()
            if (error := None if task.cancelled() else task.exception()) is not None and not self._over.done():
                self._over.set_exception(error)
            if task.cancelled() or error is not None:
                return
            self._call.record.sent_bytes += len(task.result())
            self._stream.send(task.result())
        self._go_on()

    def _go_on(self) -> None:
        while self._unread and self._may_begin:
            message = self._unread.popleft()
            self._stream.hold(-len(message))
            self._begin(message)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._last_came and not (self._order or self._unread or self._over.done()):
            self._over.set_result(None)
