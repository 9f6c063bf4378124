"""The parent's side of a verification's child process: a crash or a stall is a verdict, not an exception."""

from __future__ import annotations

from typing import TypeVar

from exportkit.child.conversation import ChildEndedError, Conversation
from exportkit.child.messages import Failed, Message
from exportkit.child.process import SearchPath
from exportkit.verify.outcomes import Crashed, TimedOut

LOAD_TIMEOUT = 600.0  # seconds at least, for a first command: a slow machine imports torch for minutes

M = TypeVar("M", bound=Message)


class VerifyWorker:
    """A child process that answers commands.

    Args:
        module: The module whose `main` the child runs.
        search_path: Where the child imports from, as for ChildProcess.
    """

    def __init__(self, module: str, *, search_path: SearchPath) -> None:
        self._conversation = Conversation(module, search_path=search_path)
        self._ended: Crashed | TimedOut | None = None

    def __enter__(self) -> VerifyWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._ended is None and self._conversation.alive

    def ask(self, command: Message, answer: type[M], *, doing: str, timeout: float) -> M | Failed | Crashed | TimedOut:
        """Sends a command and returns the answer, or how the child ended.

        Args:
            command: One that the child has a handler for.
            answer: The class its handler returns.
            doing: What the command does, for the messages: "running case 0".
            timeout: Seconds after which the child is killed.
        """
        if self._ended is not None:
            return self._ended
        try:
            return self._conversation.ask(command, answer, timeout=timeout)
        except TimeoutError:
            self._ended = TimedOut(timeout, doing)
        except ChildEndedError as error:
            killed = error.status < 0
            printed = self._conversation.printed()
            self._ended = Crashed(-error.status if killed else None, None if killed else error.status, doing, printed)
        return self._ended

    def printed(self) -> str:
        """The end of what the child wrote to stdout and stderr."""
        return self._conversation.printed()

    def close(self) -> None:
        """Ends the child, whatever it is doing."""
        self._conversation.close()
