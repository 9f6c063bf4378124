"""Talks to a verification's child process. A crash or a timeout becomes a verdict instead of an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Failed, Message
from exportkit.child.process import SearchPath
from exportkit.verify.outcomes import Crashed, TimedOut

LOAD_TIMEOUT = 600.0  # the least seconds for a first command: importing torch takes minutes on a slow machine

M = TypeVar("M", bound=Message)


class VerifyWorker:
    """A child process that answers commands: `main` of a module. `search_path` is that of ChildProcess."""

    def __init__(self, module: str, *, search_path: SearchPath, with_torch: bool = True) -> None:
        self._client = ChildClient(module, search_path=search_path, with_torch=with_torch)
        self._ended: Crashed | TimedOut | None = None

    def __enter__(self) -> VerifyWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the child can take a command."""
        return self._ended is None and self._client.alive

    def ask(self, command: Message, answer: type[M], *, doing: str, timeout: float) -> M | Failed | Crashed | TimedOut:
        """Sends a command and returns the answer, or how the child ended.

        `doing` is for messages, such as "running case 0". A child that answers too late is killed.
        """
        return self._answered(lambda: self._client.ask(command, answer, timeout=timeout), doing, timeout)

    def tell(self, command: Message) -> None:
        """Sends a short command to a child that starts, and does not wait for the answer, which is for `hear`."""
        self._client.tell(command)

    def hear(self, answer: type[M], *, doing: str, timeout: float) -> M | Failed | Crashed | TimedOut:
        """Returns the answer to what was told, or how the child ended. The arguments are those of `ask`."""
        return self._answered(lambda: self._client.hear(answer, timeout=timeout), doing, timeout)

    def _answered(
        self, answer: Callable[[], M | Failed], doing: str, timeout: float
    ) -> M | Failed | Crashed | TimedOut:
        if self._ended is not None:
            return self._ended
        try:
            return answer()
        except TimeoutError:
            self._ended = TimedOut(timeout, doing)
        except ChildEndedError as error:
            killed = error.status < 0
            printed = self._client.printed()
            self._ended = Crashed(-error.status if killed else None, None if killed else error.status, doing, printed)
        return self._ended

    def printed(self) -> str:
        """Returns the end of the child's stdout and stderr."""
        return self._client.printed()

    def close(self) -> None:
        """Ends the child at once."""
        self._client.close()
