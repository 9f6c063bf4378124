"""One ModelStreamInfer: its requests run together, and are answered in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from exportkit.serve.engine.counted_steps import CountedStep
from exportkit.serve.engine.execution import BatchResult
from exportkit.serve.request_record import RequestRecord
from exportkit.serve.rpc.known_heads import Found
from exportkit.serve.rpc.rpc_calls import Observe, RpcCall
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.statuses import ServeError

MOST_REQUESTS = 256  # of a stream that wait or run, as many as a client without streams may well send
_MOST_UNSENT = 1 << 20  # bytes of answers that wait for a client before its next request runs


Count = Callable[[str, str, int], None]
"""Counts answered requests of a model and its version."""


class StreamService(Protocol):
    """What answers the requests of a stream.

    Attributes:
        observe: Gets each request when it is over.
        count: Counts answered ones, where that is all that is wanted of them.
    """

    observe: Observe | None
    count: Count | None

    def infer(self, data: Message, seconds_left: float | None, record: RequestRecord) -> Coroutine[Any, Any, bytes]:
        """Answers a request."""

    def known(self, message: Message) -> Found | None:
        """Returns what is known of a request that is like one before."""

    def encoded(self, found: Found, result: BatchResult) -> bytes:
        """Returns the answer to such a request."""

    def begins(self, found: Found) -> bool:
        """Whether who answered requests like this one would begin its sequence, too."""

    def in_stream(self, answer: bytes | ServeError) -> bytes:
        """Returns the message of an answer or an error."""


class InferStream:
    """The requests of one call."""

    def __init__(self, answers: StreamService, call: RpcCall) -> None:
        """`run` answers them."""
        self._answers = answers
        self._call = call
        self._stream = call.stream
        self._loop = asyncio.get_running_loop()
        self._order: dict[_Request, None] = {}
        self._unread: deque[Message] = deque()
        self._last_came = False
        self._tasks_begin = 0  # how many, in this turn of the loop: what comes now must not overtake them
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Returns when the last request is answered. What a request raises that is no ServeError ends the stream."""
        self._stream.drained = self._go_on
        try:
            self._stream.consume(self._take)
            await self._over
        finally:
            self._stream.drained = None
            tasks = [task for request in self._order if (task := request.give_up()) is not None]
            self._order.clear()
            self._unread.clear()
            if tasks:
                await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, message: Message | None) -> None:
        if message is None:
            self._last_came = True
            self._end_if_done()
            return
        if not self._unread and self._may_begin:
            self._begin(message)
        else:
            self._unread.append(message)
            self._stream.hold(len(message))

    @property
    def _may_begin(self) -> bool:
        return len(self._order) < MOST_REQUESTS and self._stream.unsent < _MOST_UNSENT

    def _begin(self, message: Message) -> None:
        self._call.record.received_bytes += len(message)
        request = _Request(self, self._answers, self._call)
        self._order[request] = None
        request.begin(message)

    def begin_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins a task. It gets as far as its sequence's queue in the next turn of the loop."""
        self._tasks_begin += 1
        task = self._loop.create_task(work)
        self._loop.call_soon(self._tasks_began)
        return task

    def _tasks_began(self) -> None:
        self._tasks_begin -= 1

    @property
    def in_order(self) -> bool:
        """Whether a request that begins at once overtakes none before it."""
        return not self._tasks_begin

    def answered(self, request: _Request) -> None:
        """Sends what is the next in order."""
        order, stream = self._order, self._stream
        while order and (data := (first := next(iter(order))).answer) is not None:
            del order[first]
            self._call.record.sent_bytes += len(data)
            stream.send(data)
        if self._unread:
            self._go_on()
        elif self._last_came:
            self._end_if_done()

    def _go_on(self) -> None:
        while self._unread and self._may_begin:
            message = self._unread.popleft()
            self._stream.hold(-len(message))
            self._begin(message)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._last_came and not (self._order or self._unread or self._over.done()):
            self._over.set_result(None)

    def leave(self) -> None:
        """Ends the stream once the requests that came are answered: the server ends, and the client may never do."""
        self._last_came = True
        self._end_if_done()

    def failed(self, error: BaseException) -> None:
        """Ends the stream: a request failed in a way that is no answer."""
        if not self._over.done():
            self._over.set_exception(error)


class _Request:
    """A request of a stream.

    Attributes:
        answer: The message that answers it; None: it is not there yet.
    """

    __slots__ = (
        "_answers",
        "_call",
        "_found",
        "_of",
        "_record",
        "_step",
        "_task",
        "answer",
    )

    def __init__(self, of: InferStream, answers: StreamService, call: RpcCall) -> None:
        self._of = of
        self._answers = answers
        self._call = call
        self.answer: bytes | None = None
        self._found: Found | None = None
        self._step: CountedStep | None = None
        self._task: asyncio.Task[None] | None = None
        self._record: RequestRecord | None = None

    def begin(self, message: Message) -> None:
        if self._of.in_order and self._call.seconds_left is None:
            found = self._answers.known(message)
            if found is not None and self._continue(found, len(message)):
                return
        record = self._call.new_record()
        record.received_bytes = len(message)
        self._task = self._of.begin_task(self._run(message, record))

    def _continue(self, found: Found, size: int) -> bool:
        """Begins a step of a sequence without a task. Returns whether it is one that can be."""
        known = found.known
        if found.step.start and not self._answers.begins(found):
            return False
        self._found = found
        if self._answers.count is None:
            self._record = self._new_record(found, size)
        try:
            step = found.head.owned_by(self._call.client)
            self._step = found.model.short_step(step, known.form, found.data, self._answered, priority=known.priority)
        except ServeError as error:
            self._finish(error)
            return True
        return self._step is not None

    def _new_record(self, found: Found, size: int) -> RequestRecord:
        record, model = self._call.new_record(), found.model
        record.received_bytes, record.sequence = size, found.head.step.id
        record.model, record.version = model.name, model.version
        return record

    def _answered(self, outcome: BatchResult | ServeError) -> None:
        if self._found is None:  # it was given up
            return
        if isinstance(outcome, ServeError):
            self._finish(outcome)
            return
        data = self._answers.encoded(self._found, outcome)
        if self._record is not None:
            self._record.timing = outcome.timing
        self._finish(data)
        self._of.answered(self)

    def _finish(self, outcome: bytes | ServeError) -> None:
        if self._found is not None and self._answers.count is not None and not isinstance(outcome, ServeError):
            self._answers.count(self._found.model.name, self._found.model.version, 1)
        else:
            self._observe(outcome)
        self._step = None
        self.answer = self._answers.in_stream(outcome)
        if isinstance(outcome, ServeError):
            asyncio.get_running_loop().call_soon(self._of.answered, self)

    def _observe(self, outcome: bytes | ServeError) -> None:
        if self._answers.observe is None or self._found is None:
            return
        record = self._record or self._new_record(self._found, sum(part.nbytes for part in self._found.data))
        if isinstance(outcome, ServeError):
            record.failed(outcome)
        else:
            record.status, record.sent_bytes = 200, len(outcome)
        self._answers.observe(self._call, record)

    async def _run(self, message: Message, record: RequestRecord) -> None:
        inference = self._answers.infer(message, self._call.seconds_left, record)
        del message
        try:
            with self._call.recorded(record, self._answers.observe):
                data = await inference
                record.sent_bytes = len(data)
            self.answer = self._answers.in_stream(data)
        except ServeError as error:
            self.answer = self._answers.in_stream(error)
        except Exception as error:
            self._of.failed(error)
            return
        self._of.answered(self)

    def give_up(self) -> asyncio.Task[None] | None:
        """Nobody waits for the answer any more. Returns what ends soon."""
        if self._task is not None:
            self._task.cancel()
            return self._task
        if self._step is not None:
            self._step.give_up()
            self._observe(self._call.why_cancelled())
            self._found = None
        return None
