"""The parent's side of a conversation with a child process."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Self, TypeVar

from exportkit.child.channel import Channel
from exportkit.child.messages import Failed, Message, decode, encode
from exportkit.child.process import ChildProcess, SearchPath, describe_end
from exportkit.errors import LibraryLoadError

M = TypeVar("M", bound=Message)


class ChildEndedError(Exception):
    """The child process ended before it answered. `status` is its return code, as subprocess has it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class ChildClient:
    """A child process that answers one command after the other, with `messages.serve` at its end. See ChildProcess."""

    def __init__(self, module: str, *, search_path: SearchPath, with_torch: bool = True) -> None:
        self._process = ChildProcess(module, search_path=search_path, captured=True, with_torch=with_torch)
        self._channel = Channel(self._process.connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.wait(0) is None

    def ask(self, command: Message, answer: type[M], *, timeout: float | None = None) -> M | Failed:
        """Sends a command and returns the answer, of the class that its handler returns.

        Raises:
            ChildEndedError: The child ended before it answered.
            TimeoutError: The child was killed, because it gave no answer in so many seconds.
        """
        self.tell(command, timeout=timeout)
        return self.hear(answer, timeout=timeout)

    def result(self, command: Message, answer: type[M], *, timeout: float | None = None) -> M:
        """As `ask`, but raises the error that the child answers with."""
        got = self.ask(command, answer, timeout=timeout)
        if isinstance(got, Failed):
            raise got.exception()
        return got

    def load_error(self, library: str, error: ChildEndedError, hint: str | None = None) -> LibraryLoadError:
        """The error for a library that ended the child that loaded it. The hint is for one that exited by itself."""
        printed = self.printed()
        return LibraryLoadError(
            f"a process that loads {library} {describe_end(error.status)}" + (f":\n{printed}" if printed else ""),
            hint="A malformed schema does that, and so does a namespace that torch or another library already has."
            if error.status < 0
            else hint,
        )

    def tell(self, command: Message, *, timeout: float | None = None) -> None:
        """Sends a command, to which `hear` has the answer. If the child has ended, `hear` says so.

        TimeoutError: the child was killed, because it did not take the command in time.
        """
        self._allow(timeout)
        try:
            with suppress(ConnectionError):
                self._channel.send(encode(command))
        except TimeoutError:
            self.close()
            raise

    def _allow(self, timeout: float | None) -> None:
        self._channel.deadline = None if timeout is None else time.monotonic() + timeout

    def hear(self, answer: type[M], *, timeout: float | None = None) -> M | Failed:
        """Waits for the answer to a command that `tell` sent. It takes and raises what `ask` does."""
        self._allow(timeout)
        try:
            answered: M | Failed = decode(self._channel.receive()[0], answer | Failed)
            return answered
        except TimeoutError:
            self.close()
            raise
        except ConnectionError as error:
            status = self._process.wait(timeout)
            if status is None:  # it closed its end of the socket, and goes on
                self.close()
                raise TimeoutError from error
            raise ChildEndedError(status) from error

    def printed(self) -> str:
        """The end of what the child has printed so far."""
        return self._process.printed()

    def close(self) -> None:
        """Ends the child, whatever it is doing."""
        self._process.end()
        self._channel.close()
