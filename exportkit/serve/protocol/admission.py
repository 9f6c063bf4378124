"""How an inference reaches a model, in this process or in another: there is room for its body first."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStart, SequenceStep
from exportkit.serve.protocol.seen_methods import check_method
from exportkit.serve.statuses import ServeError
from exportkit.serve.tenants.tenants import Tenant

if TYPE_CHECKING:
    from exportkit.serve.engine.repository import Repository
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


Open = Callable[[str, str, int, str], AbstractAsyncContextManager[Admitted]]
"""Asks for a model by its name and version (empty: the newest), and for room for a body of so many bytes of a client.

The room is given back when the context is left. If there is no such model, or the client has as much as it may have,
entering raises a ServeError.
"""


def admission_to(repository: Repository, name: str, version: str, size: int, tenant: Tenant | None) -> LocalAdmission:
    """Returns the request of a client for a model of this process: see `Open`."""
    if tenant is None or tenant.rules.models is None:
        return LocalAdmission(partial(repository.named, name, version), size, tenant)
    return LocalAdmission(partial(repository.named, name, version, sees=tenant.rules.sees), size, tenant)


class LocalAdmission:
    """A request for a model of this process: an `Admitted`, and its context."""

    model: Named
    name: str
    version: str
    body_rules: BodyRules

    def __init__(self, find: Callable[[], Named], size: int, tenant: Tenant | None = None) -> None:
        """Nothing was asked yet.

        Args:
            find: Returns the model. Raises a ServeError if there is none.
            size: The bytes of the body, as far as they are known.
            tenant: Whose request it is. None: no key is asked for.
        """
        self.refused: ServeError | None = None
        self._find = find
        self._size = size
        self._tenant = tenant
        self._client = "" if tenant is None else tenant.queue
        self._room = ExitStack()

    def enter(self) -> LocalAdmission:
        """Reserves the room."""
        with ExitStack() as undo:
            if self._tenant is not None:
                undo.enter_context(self._tenant)
            self.model = model = self._find()
            self._room = undo.pop_all()
        self.name, self.version, self.body_rules = model.name, model.version, model.body_rules
        try:
            self.reserve(self._size)
        except ServeError as error:
            self.refused = error.with_traceback(None)  # which would keep this object in a reference cycle
        return self

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes. Raises a ServeError if there is none."""
        self._room.enter_context(self.model.admit(size, self._client))

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
        self.check_start_now(start)

    def check_start_now(self, start: SequenceStart) -> None:
        """Likewise."""
        self._check_method(start.method)
        self.model.check_start(start)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers the request."""
        tenant = self._tenant
        if tenant is None:
            return await self.model.infer(request)
        self._check_method(request.method)
        began = time.perf_counter()
        tenant.take_rows(self.model.rows_of(request))
        answer = await self.model.infer(replace(request, client=self._client) if self._client else request)
        tenant.give_answer(time.perf_counter() - began)
        return answer

    def _check_method(self, method: str | None) -> None:
        if self._tenant is not None and self._tenant.rules.models is not None:
            check_method(self._tenant.rules, self.model, method)

    def give_up(self, step: SequenceStep) -> None:
        """Ends a sequence whose answer cannot be written."""
        self.model.give_up(step)
