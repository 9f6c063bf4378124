"""How an inference reaches a model, in this process or in another: there is room for its body first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStart, SequenceStep
from exportkit.serve.statuses import ServeError

if TYPE_CHECKING:  # it imports torch, which a receiver must not load
    from exportkit.serve.engine.served_package import Named


class Admitted(Protocol):
    """A request for a model.

    Attributes:
        name: The model.
        version: Its version.
        body_rules: What the body may hold.
        refused: Why there is no room for the body; None: there is.
    """

    name: str
    version: str
    body_rules: BodyRules
    refused: ServeError | None

    async def grow(self, size: int) -> None:
        """Makes room for `size` bytes more of a body whose size was not known. Raises a ServeError if there is none."""

    async def check_start(self, start: SequenceStart) -> None:
        """Raises a ServeError if a sequence cannot begin now."""

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers the request. Raises a ServeError if there is no answer."""

    def give_up(self, step: SequenceStep) -> None:
        """Ends a sequence whose step was answered here, and the answer cannot be written."""


Open = Callable[[str, str, int], AbstractAsyncContextManager[Admitted]]
"""Asks for a model by its name and version (empty: the newest), and for room for a body of so many bytes.

The room is given back when the context is left. If there is no such model, entering raises a ServeError.
"""


class LocalAdmission:
    """A request for a model of this process: an `Admitted`, and its context."""

    def __init__(self, model: Named, size: int) -> None:
        """`size` is that of the body, as far as it is known."""
        self.model = model
        self.name, self.version, self.body_rules = model.name, model.version, model.body_rules
        self.refused: ServeError | None = None
        self._size = size
        self._room = ExitStack()

    def enter(self) -> LocalAdmission:
        """Reserves the room."""
        try:
            self.reserve(self._size)
        except ServeError as error:
            self.refused = error.with_traceback(None)  # which would keep this object in a reference cycle
        return self

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes. Raises a ServeError if there is none."""
        self._room.enter_context(self.model.admit(size))

    def leave(self) -> None:
        """Gives the room back."""
        self._room.close()

    async def __aenter__(self) -> LocalAdmission:
        """Reserves the room."""
        return self.enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the room back."""
        self.leave()

    async def grow(self, size: int) -> None:
        """Makes room for more."""
        self.reserve(size)

    async def check_start(self, start: SequenceStart) -> None:
        """Checks whether a sequence can begin."""
        self.model.check_start(start)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers the request."""
        return await self.model.infer(request)

    def give_up(self, step: SequenceStep) -> None:
        """Ends a sequence whose answer cannot be written."""
        self.model.give_up(step)
