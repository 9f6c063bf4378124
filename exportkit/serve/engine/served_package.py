"""One load of a package: its methods, what they have accepted, and which of them answers a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

from exportkit.serve.engine.loading import LoadedPackage
from exportkit.serve.engine.own_thread import in_own_thread
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.process_settings import give_freed_memory_back
from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStep
from exportkit.serve.statuses import BadRequestError, NotReadyError, NotServedError


class ServedPackage:
    """What is served of one load of a package. Its methods become ready, leave and end together.

    Where no method has the package's name, it stands for them: it takes what `ServedModel` takes, and gives it to the
    method that is named.

    Attributes:
        name: The name of the package.
        version: Its version.
        manifest: Its manifest.
        replicas: The package on each device.
        models: What is served, by method; empty when it is closed.
        offered: What is served and what is not.
        sequences: The package's sequences, which other loads share; None: no method has state.
        body_rules: What the body of a request to the package may hold.
        leaving: Why no new request is accepted; None: they are.
        closed: Whether everything that was accepted is answered, so that what still comes is its successor's.
        accepted_bytes: The bytes of the bodies that were accepted and not answered yet.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedPackage,
        counted: Callable[[str, str], Statistics],
        sequences: ServedSequences | None,
    ) -> None:
        """Nothing runs yet: `start` starts the runners.

        Args:
            name: The name of the package.
            loaded: What to serve.
            counted: Returns what counts for a name and a version.
            sequences: The package's sequences.

        Raises:
            BackendError: The protocol has no datatype for an input or output.
        """
        self.name, self.version = name, loaded.methods[0].version
        self.manifest, self.offered = loaded.methods[0].manifest, loaded.offered
        self.replicas, self._warm_up = loaded.replicas, loaded.warm_up
        self.sequences = sequences if any(each.stateful for each in loaded.methods) else None
        self.models = {
            each.method: ServedModel(each, self, counted(each.name, each.version)) for each in loaded.methods
        }
        rules = {method: model.body_rules for method, model in self.models.items()}
        largest = max(each.max_bytes for each in rules.values())
        self.body_rules = BodyRules((), (), batched=False, max_bytes=largest, name=name, methods=rules)
        for model in self.models.values():
            if model.name == name:
                model.body_rules = replace(model.body_rules, methods=rules)
        self.leaving: str | None = None
        self.closed = False
        self.accepted_bytes = 0
        self._accepted = 0
        self._answered = asyncio.Event()
        self._successor: Callable[[], ServedPackage | None] | None = None

    async def start(self) -> None:
        """Starts the runners, and waits until every one is warmed up. Raises what one of them raised."""
        await asyncio.gather(*(model.start(warm_up=self._warm_up) for model in self.models.values()))

    # --- which model answers ------------------------------------------------------------------------------------------

    def model_for(self, asked: str, request: InferRequest) -> ServedModel:
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
        return began.models[model.method]

    def newest(self) -> ServedPackage:
        """Returns the load that serves in its place: itself, if it was not exchanged. Raises NotReadyError if none."""
        following = self._successor() if self._successor is not None else None if self.closed else self
        if following is None:
            raise NotReadyError(f"the model {self.name} was unloaded")
        return following

    def named(self, name: str) -> ServedModel:
        """Returns the model of a name. Raises NotReadyError if this load has none."""
        for model in self.models.values():
            if model.name == name:
                return model
        raise NotReadyError(f"the model {name} was unloaded")

    def chosen(self, asked: str, method: str | None) -> ServedModel:
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
    def _default(self) -> ServedModel | None:
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

    async def close(self, successor: Callable[[], ServedPackage | None] | None = None) -> None:
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

    # --- as ServedModel -----------------------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """The names under which it answers."""
        return [model.name for model in self.models.values()]

    def admit(self, size: int, *, waits: bool = False) -> contextlib.AbstractContextManager[None]:
        """Reserves room for a body: see `ServedModel.admit`."""
        load = self.newest() if self.closed else self
        return next(iter(load.models.values())).admit(size, waits=waits)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers a request by the method that it names. Raises a ServeError."""
        return await self.model_for(self.name, request).answer(request)

    def give_up(self, step: SequenceStep) -> None:
        """See `ServedModel.give_up`."""
        if self.sequences is not None:
            self.sequences.give_up(step)

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's metadata. Without a default method there are no inputs and outputs but `methods`'."""
        one = next(iter(self.models.values())).metadata()
        shared = {key: one[key] for key in ("versions", "platform", "methods")}
        return {"name": self.name, **shared, "inputs": [], "outputs": []}

    def config(self) -> dict[str, Any]:
        """Each method has a configuration of its own. Raises NotServedError."""
        return self.chosen(self.name, None).config()


Named = ServedModel | ServedPackage
"""What a name of the protocol stands for."""
