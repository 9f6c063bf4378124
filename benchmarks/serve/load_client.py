"""A client that does as little as one can: sockets that stay open, requests that are built before, threads.

One Python process sends at most one core's worth of bytes. `closed_loop_of_processes` starts this module several times:

    python -m benchmarks.serve.load_client PORT REQUEST CONNECTIONS SECONDS
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)


class Connection:
    """An HTTP connection that is kept open."""

    def __init__(self, port: int, timeout: float = 60.0) -> None:
        """Connects to a port of this machine."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def request(self, request: bytes) -> tuple[int, bytes]:
        """Sends a request and returns the answer's status and body."""
        self._socket.sendall(request)
        return self.answer()

    def send(self, part: bytes) -> None:
        """Sends a part of a request."""
        self._socket.sendall(part)

    def answer(self) -> tuple[int, bytes]:
        """Receives an answer.

        Raises:
            ConnectionError: The server closed the connection before the answer's end.
        """
        received = bytearray(self._rest)
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._receive()
        head = bytes(received[: end + 2])
        status = int(head.split(b" ", 2)[1])
        del received[: end + 4]
        if (found := _LENGTH.search(head)) is not None:
            size = int(found[1])
            received = self._filled(received, size)
            self._rest = bytes(received[size:])
            return status, bytes(received[:size])
        if not _CHUNKED.search(head):
            raise ConnectionError(f"the answer does not say its length: {head!r}")
        return status, self._chunks(received)

    def close(self) -> None:
        """Closes the connection, in the middle of an answer too."""
        self._socket.close()

    def _receive(self) -> bytes:
        part = self._socket.recv(65536)
        if not part:
            raise ConnectionError("the server closed the connection")
        return part

    def _filled(self, received: bytearray, size: int) -> bytearray:
        """Receives until there are `size` bytes."""
        if len(received) >= size:
            return received
        whole = bytearray(size)
        whole[: len(received)] = received
        view, filled = memoryview(whole), len(received)
        while filled < size:
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionError("the server closed the connection")
            filled += count
        return whole

    def _chunks(self, received: bytearray) -> bytes:
        """Receives chunks until an empty one."""
        body = bytearray()
        while True:
            while (end := received.find(b"\r\n")) < 0:
                received += self._receive()
            size = int(received[:end], 16)
            received = self._filled(received[end + 2 :], size + 2)
            body += received[:size]
            del received[: size + 2]
            if not size:
                self._rest = bytes(received)
                return bytes(body)


@dataclass
class Load:
    """What a client saw.

    Attributes:
        seconds: Of each answer with status 200, from the moment at which its request was due.
        failed: How many answers had each other status; status 0 is a broken connection.
        elapsed: Seconds of the whole.
    """

    seconds: list[float] = field(default_factory=list)
    failed: dict[int, int] = field(default_factory=dict)
    elapsed: float = 0.0

    def percentile(self, part: float) -> float:
        """Returns seconds within which a part of the answers came."""
        ordered = sorted(self.seconds)
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else float("nan")

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.seconds) / self.elapsed


def closed_loop(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """Each connection sends its next request when it has the answer to the last one."""
    end = time.perf_counter() + seconds
    return _load(port, request, connections, iter(lambda: time.perf_counter(), end), end)


def closed_loop_of_processes(port: int, request: bytes, connections: int, seconds: float, processes: int) -> Load:
    """The same from several processes, which share the connections.

    Raises:
        RuntimeError: A process failed.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(request)
        file.flush()
        shares = [connections * (i + 1) // processes - connections * i // processes for i in range(processes)]
        command = [sys.executable, "-m", "benchmarks.serve.load_client", str(port), file.name]
        clients = [
            subprocess.Popen(
                [*command, str(share), str(seconds)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
            )
            for share in shares
        ]
        answers = [client.communicate()[0] for client in clients]
    if any(client.returncode for client in clients):
        raise RuntimeError(f"a client failed: {[client.returncode for client in clients]}")
    loads = [Load(**json.loads(answer)) for answer in answers]
    whole = Load(elapsed=max(load.elapsed for load in loads))
    for load in loads:
        whole.seconds += load.seconds
        for status, count in load.failed.items():
            whole.failed[int(status)] = whole.failed.get(int(status), 0) + count
    return whole


def open_loop(port: int, request: bytes, rate: float, seconds: float, connections: int = 64) -> Load:
    """Requests are due at random moments, `rate` a second, whether or not answers have come.

    A request that is due while all connections wait for answers is sent later, and its time runs from when it was due.
    """
    chance, start = random.Random(0), time.perf_counter()
    gaps = (chance.expovariate(rate) for _ in itertools.count())
    return _load(port, request, connections, itertools.accumulate(gaps, initial=start), start + seconds)


def _load(port: int, request: bytes, connections: int, due: itertools.accumulate[float] | object, end: float) -> Load:
    load, lock, start = Load(), threading.Lock(), time.perf_counter()

    def next_due() -> float:
        with lock:
            return next(due)

    def work() -> None:
        connection: Connection | None = None
        while (moment := next_due()) < end:
            time.sleep(max(0.0, moment - time.perf_counter()))
            try:
                connection = connection or Connection(port)
                status, _ = connection.request(request)
            except OSError:
                status, connection = 0, None
            taken = time.perf_counter() - moment
            with lock:
                if status == 200:
                    load.seconds.append(taken)
                else:
                    load.failed[status] = load.failed.get(status, 0) + 1
        if connection is not None:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.elapsed = time.perf_counter() - start
    return load


def main() -> None:
    port, request, connections, seconds = sys.argv[1:]
    load = closed_loop(int(port), Path(request).read_bytes(), int(connections), float(seconds))
    print(json.dumps(dataclasses.asdict(load)))


if __name__ == "__main__":
    main()
