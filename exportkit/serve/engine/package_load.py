"""One load of a package: what it has accepted, and which of its methods answers a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Generic, Protocol, TypeVar

from exportkit.serve.engine.loading import LoadedPackage
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.process_settings import give_freed_memory_back
from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.statuses import BadRequestError, NotReadyError, NotServedError


class LoadedModel(Protocol):
    """A method that is served, as its load sees it: `ServedModel`."""

    name: str
    method: str

    @property
    def sequences(self) -> ServedSequences | None:
        """The package's sequences, if each request is a step of one."""

    async def start(self, *, warm_up: bool) -> None:
        """Starts the runners."""

    def fail_waiting(self, reason: str, /) -> None:
        """Answers what waits with NotReadyError."""

    def stop(self) -> list[Thread]:
        """Lets the runners end."""


M = TypeVar("M", bound=LoadedModel)


class PackageLoad(Generic[M]):
    """One load of a package. Its methods become ready, leave and end together.

    Attributes:
        name: The name of the package.
        version: Its version.
        manifest: Its manifest.
        replicas: The package on each device.
        models: What is served, by method; empty when it is closed.
        offered: What is served and what is not.
        sequences: The package's sequences, which other loads share; None: no method has state.
        leaving: Why no new request is accepted; None: they are.
        closed: Whether everything that was accepted is answered, so that what still comes is its successor's.
        accepted_bytes: The bytes of the bodies that were accepted and not answered yet.
    """

    def __init__(self, name: str, loaded: LoadedPackage, sequences: ServedSequences | None) -> None:
        """Nothing is served yet."""
        self.name, self.version = name, loaded.methods[0].version
        self.manifest, self.offered = loaded.methods[0].manifest, loaded.offered
        self.replicas, self._warm_up = loaded.replicas, loaded.warm_up
        self.sequences = sequences if any(each.stateful for each in loaded.methods) else None
        self.models: Mapping[str, M] = {}
        self.leaving: str | None = None
        self.closed = False
        self.accepted_bytes = 0
        self._accepted = 0
        self._answered = asyncio.Event()
        self._successor: Callable[[], PackageLoad[M] | None] | None = None

    async def start(self) -> None:
        """Starts the runners, and waits until every one is warmed up. Raises what one of them raised."""
        await asyncio.gather(*(model.start(warm_up=self._warm_up) for model in self.models.values()))

    # --- which model answers ------------------------------------------------------------------------------------------

    def model_for(self, asked: str, request: InferRequest) -> M:
        """Returns the model that answers a request.

        A step is for the load on which its sequence began. What begins, and what comes when this load is closed, is for
        the newest.

        Args:
            asked: The name that the request asks: that of the package or of a method.
            request: The request, which may name a method.

        Raises:
            BadRequestError: The name and the method contradict each other, or its sequence's version has no such
                method.
            NotServedError: No method is named, or one that is not served.
            NotReadyError: The package was unloaded.
        """
        step = request.sequence
        load = self.newest() if self.closed or (step is not None and step.start) else self
        model = load.chosen(asked, request.method)
        if step is None or step.start or model.sequences is None:
            return model
        began = model.sequences.load_of(step)
        if began is None:
            return model
        if model.method not in began.models:
            raise BadRequestError(f"the sequence began with version {began.version}, which has no {model.method}")
        found: M = began.models[model.method]
        return found

    def newest(self) -> PackageLoad[M]:
        """Returns the load that serves in its place: itself, if it was not exchanged. Raises NotReadyError if none."""
        following = self._successor() if self._successor is not None else None if self.closed else self
        if following is None:
            raise NotReadyError(f"the model {self.name} was unloaded")
        return following

    def named(self, name: str) -> M:
        """Returns the model of a name. Raises NotReadyError if this load has none."""
        for model in self.models.values():
            if model.name == name:
                return model
        raise NotReadyError(f"the model {name} was unloaded")

    def chosen(self, asked: str, method: str | None) -> M:
        """Returns the method that a name and the parameter `method` mean. The errors are `model_for`'s."""
        if method is None and (asked != self.name or self._default is not None):
            return self.named(asked)
        found = None if method is None else self.models.get(method)
        if found is None:
            raise self.not_served(method)
        if asked not in (self.name, found.name):
            raise BadRequestError(
                f"the request is for {asked}, and its parameter `method` says {shown(found.method)}",
                hint=f"Ask {self.name} or {found.name}, or leave the parameter out.",
            )
        return found

    @property
    def _default(self) -> M | None:
        """The method that has the package's name."""
        return next((model for model in self.models.values() if model.name == self.name), None)

    def not_served(self, method: str | None) -> NotServedError:
        """Returns why a method, or (None) the package's name, answers nothing."""
        reason = self.offered.left_out.get("forward" if method is None else method)
        if method is None:
            message = f"the model {self.name} has no default method that is served"
            message += f": forward {reason}" if reason else ""
        else:
            message = f"the method {shown(method)} of {self.name} is not served"
            message += f": it {reason}" if reason else ""
        methods, names = ", ".join(self.models), ", ".join(self.names)
        hint = f"Its methods are {methods}: by the parameter `method`, or the names {names}."
        return NotServedError(message, hint=hint)

    # --- whether it answers -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether a replica can be called."""
        return any(replica.alive for replica in self.replicas)

    @property
    def ready(self) -> bool:
        """Whether it is warmed up, and neither unloads nor lost its worker process."""
        return self.leaving is None and self.alive

    @property
    def failure(self) -> str | None:
        """Why it is not ready; None if it is."""
        if self.ready:
            return None
        return self.leaving or self.replicas[0].failure or "its worker process died and starts again"

    @property
    def lost(self) -> str | None:
        """Why this process can never answer again; None if it can, or will."""
        return None if any(replica.lost is None for replica in self.replicas) else self.replicas[0].lost

    @property
    def finishes_sequences(self) -> bool:
        """Whether it leaves, and sequences that run on it may end before."""
        leaves = self.leaving is not None and not self.closed
        return leaves and self.sequences is not None and self.sequences.on(self) > 0

    @contextlib.contextmanager
    def accepted(self, size: int) -> Iterator[None]:
        """Counts a body or a request as accepted and not answered."""
        self.accepted_bytes += size
        self._accepted += 1
        try:
            yield
        finally:
            self.accepted_bytes -= size
            self._accepted -= 1
            if not self._accepted:
                self._answered.set()

    def refuse_new(self, reason: str, *, waiting: bool = False) -> None:
        """Accepts no more bodies. What was accepted is answered; what waits, on demand, with NotReadyError."""
        self.leaving = reason
        for model in self.models.values() if waiting else ():
            model.fail_waiting(reason)

    async def close(self, successor: Callable[[], PackageLoad[M] | None] | None = None) -> None:
        """Frees the load once it has answered everything that it accepted.

        Args:
            successor: Returns who takes what still arrives here. (Were it the load itself, whoever holds an old one
                would keep all those that came after it.)
        """
        self._successor = successor
        if self.sequences is not None:
            await self.sequences.finish(self)
        while self._accepted:
            self._answered.clear()
            await self._answered.wait()
        self.closed, self.leaving = True, self.leaving or "it was unloaded"
        models, self.models = self.models, {}  # the last circle
        await in_own_thread(self._free, [thread for model in models.values() for thread in model.stop()])

    def _free(self, threads: Sequence[Thread]) -> None:
        for replica in self.replicas:
            replica.close()
        for thread in threads:
            thread.join()
        give_freed_memory_back()

    @property
    def names(self) -> Collection[str]:
        """The names under which it answers."""
        return [model.name for model in self.models.values()]


T = TypeVar("T")


async def in_own_thread(function: Callable[..., T], *args: object) -> T:
    """Runs a function that calls models, in a thread of its own.

    What torch and its libraries keep for each thread, such as the scratch memory of oneDNN's convolutions, is freed
    when the thread ends. The threads of `asyncio.to_thread` never end, and there are up to 32 of them. And a library
    of compiled code that was called in a thread stays mapped as long as the thread lives.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="exportkit loader")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
    finally:
        executor.shutdown(wait=False)
