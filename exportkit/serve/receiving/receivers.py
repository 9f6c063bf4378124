"""The receivers of a server: it starts them, hands them connections, answers them, and replaces one that died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.types import ASGIApp

from exportkit.child.channel import Channel
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import HostError
from exportkit.serve.engine.repository import Repository
from exportkit.serve.listeners import Acceptor
from exportkit.serve.operations.api_keys import ApiKeys
from exportkit.serve.operations.front_end import MakeApplication
from exportkit.serve.operations.metrics import Metrics
from exportkit.serve.receiving.body_memory import RESERVED_BYTES, MappedMemory, new_body_memory
from exportkit.serve.receiving.message_stream import MessageStream
from exportkit.serve.receiving.receiver_messages import (
    Count,
    Counted,
    Drain,
    FromReceiver,
    Listening,
    ReceiverMessage,
    ReloadKeys,
    Setup,
    Stop,
    decoder,
    encode,
)
from exportkit.serve.receiving.receiver_session import ReceiverSession
from exportkit.serve.serve_options import ServeOptions
from exportkit.serve.tenants.tenants import Tenants

_LOOK = "What it wrote to stderr says why."
_MODULE = "exportkit.serve.receiving.receiver"
_START_SECONDS = 60.0
_COUNT_SECONDS = 1.0
_END_SECONDS = 5.0
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 10.0  # before a receiver is replaced: doubled each time it dies
_CALM_SECONDS = 60.0  # after which a death is the first again


@dataclass(frozen=True)
class FrontEndServices:
    """What receivers need of the server.

    Attributes:
        repository: The models.
        metrics: Counts the requests.
        tenants: What each client may do, with all receivers together; None: no key is asked for.
        keys: The API keys, which the receivers read themselves; None: no key is asked for.
        open_paths: What is answered without an API key.
        report: Gets what an operator should know, a line at a time.
    """

    repository: Repository
    metrics: Metrics
    tenants: Tenants | None
    keys: ApiKeys | None
    open_paths: Collection[str]
    report: Callable[[str], None]


class Receivers:
    """Answers the connections of listening sockets with several processes. One that ends is replaced."""

    def __init__(self, options: ServeOptions, services: FrontEndServices) -> None:
        """`start` starts them."""
        self._options = options
        self._services = services
        self._running: list[_Receiver] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._delay, self._died = 0.0, 0.0

    async def start(self, sockets: Sequence[socket.socket], make: MakeApplication) -> None:
        """Starts the processes, and then answers connections.

        Raises:
            HostError: A process cannot be started, or ended at once.
        """
        self._application = make(())
        self._acceptor = Acceptor((), self._hand_out)
        await asyncio.gather(*(self._start_one() for _ in range(self._options.listen.receivers)))
        self._acceptor = Acceptor(sockets, self._hand_out, lambda: bool(self._running))

    async def count(self) -> int:
        """Counts in the metrics what became of requests until now. Returns those that are not over."""
        await asyncio.gather(*(receiver.count() for receiver in self._running))
        return sum(receiver.counted.in_flight for receiver in self._running)

    def drain(self) -> None:
        """Every answer closes its connection from now on."""
        self._tell(Drain())

    def reload_keys(self) -> None:
        """Reads the file of API keys again, in every process. Raises UsageError if it is refused."""
        if self._services.keys is not None:
            self._services.keys.reload()
            self._tell(ReloadKeys())

    async def finish(self) -> None:
        """Closes the ports and waits until every answer is sent."""
        self._stop_listening()
        self._tell(Stop())
        await asyncio.gather(*(receiver.gone.wait() for receiver in self._running))

    async def close(self) -> None:
        """Ends soon, whatever is not sent yet."""
        self._stop_listening()
        for receiver in self._running:
            receiver.process.end()
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)

    def _tell(self, message: ReceiverMessage) -> None:
        for receiver in self._running:
            receiver.stream.send(message)

    def _stop_listening(self) -> None:
        self._stopping = True
        self._acceptor.close()

    # --- processes ----------------------------------------------------------------------------------------------------

    async def _start_one(self) -> None:
        share = -(-self._options.listen.max_connections // self._options.listen.receivers)
        setup = Setup(self._options, share, tuple(sorted(self._services.open_paths)))
        receiver = await asyncio.to_thread(_Receiver, setup)
        try:
            await receiver.connect(self._services, self._application, self._lost)
            if self._stopping:
                receiver.process.end()
                return
        except BaseException:
            receiver.process.end()
            raise
        self._running.append(receiver)
        if self._services.repository.draining:
            receiver.stream.send(Drain())

    def _lost(self, receiver: _Receiver) -> None:
        """A receiver ended. Its clients lose their connections, and no others do."""
        if self._stopping or receiver not in self._running:
            return
        self._running.remove(receiver)
        task = asyncio.ensure_future(self._replace(receiver))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, receiver: _Receiver) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._died > _CALM_SECONDS:
            self._delay = 0.0
        self._died = now
        status = await asyncio.to_thread(receiver.process.wait, _END_SECONDS)
        receiver.process.end()
        end = "closed its connection" if status is None else describe_end(status)
        self._services.report(f"a receiver {end}, and is replaced")
        while not self._stopping:
            await asyncio.sleep(self._delay)
            self._delay = min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            try:
                await self._start_one()
                return
            except HostError as error:
                seconds = self._delay
                self._services.report(f"error: {error.message}. {error.hint} The next try is in {seconds:g} seconds.")

    def _hand_out(self, connection: socket.socket) -> None:
        """Gives a connection to the receiver that has the fewest. If none can take it, it is closed."""
        with connection:
            for receiver in sorted(self._running, key=lambda each: each.open_connections):
                if receiver.give(connection):
                    return


class _Receiver:
    """A process that receives.

    Attributes:
        process: The process.
        stream: What is said.
        gone: Set once it ended.
        counted: What it counted last.
    """

    def __init__(self, setup: Setup) -> None:
        """Starts the process. Blocks for a moment.

        Raises:
            HostError: It cannot be started.
        """
        self.counted = Counted([], 0, 0, 0, asked=False)
        self._given = 0  # connections
        with ExitStack() as undo:
            try:
                memory = new_body_memory(RESERVED_BYTES)
                undo.callback(os.close, memory)
                self._memory = MappedMemory(memory)
            except OSError as error:
                raise HostError(
                    f"{RESERVED_BYTES >> 30} GiB of addresses for bodies cannot be had: {error.strerror}",
                    hint="`ulimit -v` and `ulimit -f` limit them. --receivers 0 needs none.",
                ) from error
            accepted, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(theirs)
            self.process = ChildProcess(_MODULE, with_torch=False)
            try:
                Channel(self.process.connection).send(encode(setup), (memory, theirs.fileno()))
            except OSError as error:
                accepted.close()
                self.process.end()
                raise HostError(f"a receiver ended at once: {error}", hint=_LOOK) from error
        self._accepted = accepted
        self._accepted.setblocking(False)

    async def connect(
        self, services: FrontEndServices, application: ASGIApp, lost: Callable[[_Receiver], None]
    ) -> None:
        """Waits until it answers connections. `lost` is called when it ends.

        Raises:
            HostError: It ended before.
        """
        self.gone = asyncio.Event()
        self._counts = asyncio.Event()
        listening = asyncio.Event()

        def received(message: FromReceiver, behind: memoryview) -> None:
            if isinstance(message, Listening):
                listening.set()
            else:
                self._session.received(message, behind)

        def ended() -> None:
            self._accepted.close()
            self._session.ended()
            self.gone.set()
            lost(self)

        self.stream: MessageStream[FromReceiver] = MessageStream(decoder(FromReceiver), received, ended)

        def counted(message: Counted) -> None:
            for outcome, times in message.outcomes:
                services.metrics.count(outcome, times)
            services.metrics.log_lines_lost.inc(message.lines_lost - self.counted.lines_lost)
            self.counted = message
            if message.asked:
                self._counts.set()

        self._session = ReceiverSession(
            services.repository, application, self._memory, self.stream.send, counted, services.tenants
        )
        await self.stream.connect(self.process.connection)
        waiting = [asyncio.ensure_future(each.wait()) for each in (listening, self.gone)]
        await asyncio.wait(waiting, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        if not listening.is_set():
            status = self.process.wait(_END_SECONDS if self.gone.is_set() else 0)
            end = f"does not answer in {_START_SECONDS:g} s" if status is None else describe_end(status)
            raise HostError(f"a receiver {end}", hint=_LOOK)

    async def count(self) -> None:
        """Waits until it has told what it counted, for a moment."""
        self._counts.clear()
        self.stream.send(Count())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._counts.wait(), _COUNT_SECONDS)

    @property
    def open_connections(self) -> int:
        """The connections that it has, as far as it told."""
        return self._given - self.counted.closed

    def give(self, connection: socket.socket) -> bool:
        """Gives it a connection. Returns whether it took it."""
        try:
            socket.send_fds(self._accepted, [b"+"], [connection.fileno()])
        except OSError:
            return False
        self._given += 1
        return True
