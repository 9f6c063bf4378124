"""The process of a receiver: `receivers.py` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import Counter

import uvloop

from exportkit.child.channel import Channel
from exportkit.errors import ExportkitError, UsageError
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.listeners import allow_files
from exportkit.serve.operations.access_log import observers_of
from exportkit.serve.operations.api_keys import ApiKeys
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.operations.front_end import LocalFrontEnd
from exportkit.serve.operations.observation import Finished, Observation, Outcome
from exportkit.serve.operations.tls import read_tls
from exportkit.serve.process_settings import collect_requests, keep_freed_memory, log_failures
from exportkit.serve.receiving.body_memory import BodyMemory
from exportkit.serve.receiving.forwarding import receiver_app
from exportkit.serve.receiving.message_stream import MessageStream
from exportkit.serve.receiving.receiver_messages import (
    Count,
    Counted,
    Drain,
    Listening,
    ReloadKeys,
    Setup,
    Stop,
    ToReceiver,
    decoder,
)
from exportkit.serve.receiving.remote_models import RemoteModels

_COUNT_SECONDS = 0.2
_FILE_BYTES = socket.CMSG_LEN(4)

_log = logging.getLogger(__name__)


def main(connection: socket.socket) -> None:
    """Receives requests until the other process says so or ends."""
    for ours in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the other process hears them too, and tells us
        signal.signal(ours, signal.SIG_IGN)
    body, (memory, connections) = Channel(connection).receive()
    setup: Setup = decoder(Setup).decode(body)
    keep_freed_memory()
    log_failures()
    allow_files(setup.connections)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    bodies = BodyMemory(memory)
    os.close(memory)
    try:
        receiver = _Receiver(setup, bodies, socket.socket(fileno=connections))
        loop.run_until_complete(receiver.serve(connection))
    except ExportkitError as error:  # such as a file of keys that is gone since the server read it
        _log.error("a receiver cannot start: %s", error)
        os._exit(error.exit_code)
    os._exit(0)  # nothing is left to do, and threads of the log may wait for a full pipe


class _Receiver:
    """What runs in the loop."""

    def __init__(self, setup: Setup, memory: BodyMemory, accepted: socket.socket) -> None:
        self._memory = memory
        self._accepted = accepted
        self._taken = 0  # connections
        self._stop = asyncio.Event()
        self._alone = asyncio.Event()
        self._tally = _Tally()
        observers, self._closing = observers_of(setup.options, self._tally.lost)
        self._observation = Observation([self._tally, *observers])
        listen = setup.options.listen
        keys = None if listen.api_keys is None else ApiKeys(listen.api_keys)
        limits = ConnectionLimits(connections=setup.connections)
        self._front = LocalFrontEnd(limits, read_tls(listen), keys, frozenset(setup.open_paths), self._observation)
        self._stream: MessageStream[ToReceiver] = MessageStream(decoder(ToReceiver), self._received, self._ended)

    async def serve(self, connection: socket.socket) -> None:
        """Receives until `Stop`."""
        await self._stream.connect(connection)
        self._models = RemoteModels(self._stream.send, self._memory)
        options = HttpOptions(allocate=self._memory.allocate)
        await self._front.start((), lambda middleware: receiver_app(self._models, options, middleware))
        loop = asyncio.get_running_loop()
        self._accepted.setblocking(False)
        loop.add_reader(self._accepted, self._take)
        collect_requests()
        self._stream.send(Listening())
        counting = asyncio.ensure_future(self._count())
        await self._stop.wait()
        loop.remove_reader(self._accepted)
        await self._front.finish()
        counting.cancel()
        for close in self._closing:
            close()
        self._send_counts()
        self._stream.close()
        await self._alone.wait()

    def _received(self, message: ToReceiver, behind: memoryview) -> None:
        if isinstance(message, Drain):
            self._front.drain()
        elif isinstance(message, Stop):
            self._stop.set()
        elif isinstance(message, Count):
            self._send_counts(asked=True)
        elif isinstance(message, ReloadKeys):
            with contextlib.suppress(UsageError):  # the other process reads them too, and says so
                self._front.reload_keys()
        else:
            self._models.received(message, behind)

    def _ended(self) -> None:
        """The connection to the other process is closed."""
        if not self._stop.is_set():  # by the other process, which has ended
            os._exit(1)
        self._alone.set()

    def _take(self) -> None:
        """Takes the connections that the other process accepted."""
        while True:
            try:
                _, ancillary, _, _ = self._accepted.recvmsg(1, _FILE_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            if not ancillary:  # the other process closed its end
                asyncio.get_running_loop().remove_reader(self._accepted)
                return
            for _, _, data in ancillary:
                connection = socket.socket(fileno=int.from_bytes(data[:4], sys.byteorder))
                self._taken += 1
                self._front.take(connection)

    # --- numbers ------------------------------------------------------------------------------------------------------

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            self._memory.tidy()
            self._send_counts()

    def _send_counts(self, *, asked: bool = False) -> None:
        closed = self._taken - self._front.connections
        in_flight, lost = self._observation.in_flight, self._tally.lines_lost
        self._stream.send(Counted(self._tally.taken(), in_flight, closed, lost, asked))


class _Tally:
    """An observer that counts for the metrics of the other process.

    Attributes:
        lines_lost: The lines of the access log that were lost.
    """

    def __init__(self) -> None:
        self._outcomes: Counter[Outcome] = Counter()
        self.lines_lost = 0

    def __call__(self, finished: Finished) -> None:
        self._outcomes[Outcome.of(finished)] += 1

    def lost(self, lines: int) -> None:
        """Counts lines that were lost. The thread of the log calls it."""
        self.lines_lost += lines

    def taken(self) -> list[tuple[Outcome, int]]:
        """Returns what was counted since the last time."""
        counted, self._outcomes = self._outcomes, Counter()
        return list(counted.items())
