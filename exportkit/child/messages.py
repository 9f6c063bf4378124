"""What parent and child say to each other: JSON, decoded strictly. Nothing is pickled."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from exportkit import errors
from exportkit.child.channel import Channel
from exportkit.errors import ExportkitError


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A command or an answer."""


class Failed(Message, frozen=True):
    """The answer to a command that raised an error: its class, and what it says, without torch's C++ stack.

    An exportkit error has an exit code, and may have a hint.
    """

    error: str
    message: str
    hint: str | None = None
    exit_code: int | None = None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Describes an error."""
        name = type(error).__name__
        if isinstance(error, ExportkitError):
            return cls(name, error.message, error.hint, error.exit_code)
        return cls(name, str(error).strip().split("\nException raised from ", 1)[0] or "(no message)")

    @property
    def detail(self) -> str:
        """The message and the hint."""
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"

    def exception(self) -> Exception:
        """The error again: exportkit's own class, or a RuntimeError for any other."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, ExportkitError):
            return kind(self.message, hint=self.hint)
        return RuntimeError(self.message if self.error == RuntimeError.__name__ else f"{self.error}: {self.message}")


def encode(message: Message) -> bytes:
    """A message as bytes. JSON escapes carry file names that are not valid UTF-8."""
    return json.dumps(msgspec.to_builtins(message)).encode()


def decode(body: bytes, types: Any) -> Any:
    """The message of `encode`, which must be of a class, or of one of a union of classes.

    msgspec.ValidationError: it belongs to no such class, or has missing, unknown or wrong fields.
    """
    return msgspec.convert(json.loads(body), types)


def serve(connection: socket.socket, handlers: Mapping[type[Message], Callable[[Any], Message]]) -> None:
    """Answers commands in the child, by their class, until the parent closes its end.

    A command without a handler is a bug, which ends the child: msgspec.ValidationError.
    """
    channel, commands = Channel(connection), functools.reduce(operator.or_, handlers)
    with contextlib.suppress(ConnectionError):
        while True:
            command = decode(channel.receive()[0], commands)
            try:
                answer = handlers[type(command)](command)
            except Exception as error:
                answer = Failed.of(error)
            channel.send(encode(answer))
