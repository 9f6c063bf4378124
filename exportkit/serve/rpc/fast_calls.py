"""Connections and streams of requests whose plain steps C++ reads and answers: see engine/fast_steps.py."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from exportkit.serve.engine.fast_steps import FastSequence, FastSteps
from exportkit.serve.engine.step_library import StepAnswers
from exportkit.serve.rpc.rpc_stream import Message, RpcStream
from exportkit.serve.statuses import ServeError

_FRAME_AND_PREFIX = 14  # bytes before each message


class FastClient:
    """A connection. Its protocol hands over the frames with data."""

    def __init__(self, steps: FastSteps) -> None:
        """Has no calls yet."""
        self.steps = steps
        self.handle = steps.open_client()
        weakref.finalize(self, steps.library.close_client, self.handle).atexit = False

    def read(self, data: bytes, at: int) -> int:
        """Reads frames of plain steps. Returns where the first other one begins."""
        return self.steps.read(self.handle, data, at)


class FastStream:
    """A stream of requests, some of which C++ may answer. All answers go out in the order of their requests.

    Attributes:
        received: The bytes of messages that C++ read.
        sent: The bytes of all answers.
    """

    def __init__(
        self,
        client: FastClient,
        stream: RpcStream,
        owner: str,
        *,
        most: int,
        failed: Callable[[FastSequence, ServeError], bytes],
        answered: Callable[[], None],
    ) -> None:
        """C++ reads nothing before `allow`.

        Args:
            client: The connection.
            stream: The stream.
            owner: Who asks.
            most: The most requests that wait.
            failed: Makes the answer to a step that failed.
            answered: Is called when answers were sent.
        """
        self._steps, self._client, self._stream, self._most = client.steps, client, stream, most
        self._number = client.steps.new_number()
        self._handle = client.steps.library.open_call(
            client.handle, self._number, stream.number, client.steps.owner(owner)
        )
        self._own: dict[int, bytes] = {}  # answers that C++ did not make, by their places
        self._frames = False
        self._allowed = (False, False)
        self._failed, self._answered = failed, answered
        self.received = self.sent = 0
        client.steps.calls[self._number] = self
        stream.fast = self

    @property
    def waiting(self) -> int:
        """The requests that are not answered."""
        return int(self._steps.library.waiting(self._handle))

    def allow(self, *, frames: bool, messages: bool) -> None:
        """Says whether C++ may read frames, and messages. It reads frames only where a message begins with them."""
        self._frames = frames
        allowed = (frames and not self._stream.incomplete, messages)
        if allowed != self._allowed:
            self._allowed = allowed
            self._steps.library.allow(self._handle, *allowed, self._most)

    def count_read(self) -> None:
        """Counts what was read in this turn of the loop."""
        self._steps.count_read()

    def message_cut(self) -> None:
        """A message began, or is complete now."""
        self.allow(frames=self._frames, messages=self._allowed[1])

    def take(self, message: Message) -> bool:
        """Reads a message. Returns whether it is a step that is queued now."""
        return self._allowed[1] and self._steps.read_message(self._handle, bytes(message))

    def knows(self, message: Message) -> bool:
        """Returns whether it is a step of a sequence that C++ has now."""
        return bool(self._steps.library.knows(self._handle, bytes(message), len(message)))

    def read(self, frame_bytes: int, message_bytes: int, /) -> None:
        """See FastCall."""
        self.received += message_bytes
        self._stream.received_elsewhere(frame_bytes)

    def keep_place(self) -> int:
        """Returns the place of a request's answer that is made elsewhere."""
        return int(self._steps.library.keep_place(self._handle))

    def put(self, place: int, message: bytes) -> None:
        """Sends that answer when it is its turn."""
        self._own[place] = message
        self._steps.library.put(self._handle, place)
        self._send_next()

    def _send_next(self) -> None:
        more = True
        while more:
            answers = StepAnswers()
            self._steps.library.next(self._handle, ctypes.byref(answers))
            more = self._write(answers)

    def _write(self, answers: StepAnswers) -> bool:
        """Sends answers. Returns whether others may follow on them."""
        if answers.count:
            size = answers.size
            self.sent += size - _FRAME_AND_PREFIX * answers.count
            self._stream.send_frames(ctypes.string_at(answers.data, size), answers.count, answers.largest)
        if answers.own:
            message = self._own.pop(answers.place)
            self.sent += len(message)
            self._stream.send(message)
        return bool(answers.own)

    def send(self, answers: StepAnswers, /) -> None:
        """See FastCall."""
        if self._write(answers):
            self._send_next()
        self._answered()

    def failed(self, place: int, sequence: FastSequence, error: ServeError, /) -> None:
        """See FastCall."""
        self.put(place, self._failed(sequence, error))
        self._answered()

    def stop(self) -> None:
        """Reads nothing more."""
        self.allow(frames=False, messages=False)

    def close(self) -> list[FastSequence]:
        """Nobody waits for answers any more. Returns the sequence of each step that has none."""
        self.count_read()
        del self._steps.calls[self._number]
        self._stream.fast = None
        found, self._handle = self._steps.leave(self._handle), None
        return found


def fast_stream(call_stream: RpcStream, steps: FastSteps | None, **options: Any) -> FastStream | None:
    """Returns what answers the plain steps of a stream, where the library is there."""
    if steps is None:
        return None
    return FastStream(call_stream.frame_reader(lambda: FastClient(steps)), call_stream, **options)
