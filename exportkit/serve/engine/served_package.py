"""The methods of a package as one: its name stands for the method that a request names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from exportkit.serve.engine.servable import Servable
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStep
from exportkit.serve.statuses import BadRequestError, NotServedError


class ServedPackage:
    """What is served of one load of a package.

    Where no method has the package's name, it stands for them: it takes what `ServedModel` takes, and gives it to the
    method that is named.

    Attributes:
        name: The name of the package.
        version: Its version.
        models: What is served, by method.
        body_rules: What the body of a request to the package may hold.
    """

    def __init__(self, name: str, offered: Servable, models: Sequence[ServedModel]) -> None:
        """Tells the methods of one another."""
        self.name, self.version = name, models[0].version
        self.models = {model.method: model for model in models}
        self._offered = offered
        rules = {method: model.body_rules for method, model in self.models.items()}
        largest = max(each.max_bytes for each in rules.values())
        self.body_rules = BodyRules((), (), batched=False, max_bytes=largest, name=name, methods=rules)
        for model in models:
            model.package = self
            if model.name == name:
                model.body_rules = replace(model.body_rules, methods=rules)

    def chosen(self, asked: str, method: str | None) -> ServedModel:
        """Returns the method that a request means.

        Args:
            asked: The name that it asks.
            method: Its parameter `method`.

        Raises:
            BadRequestError: The two contradict each other.
            NotServedError: No method is named, or one that is not served.
        """
        found = None if method is None else self.models.get(method)
        if found is None:
            raise self._not_served(method)
        if asked not in (self.name, found.name):
            raise BadRequestError(
                f"the request is for {asked}, and its parameter `method` says {shown(found.method)}",
                hint=f"Ask {self.name} or {found.name}, or leave the parameter out.",
            )
        return found

    def _not_served(self, method: str | None) -> NotServedError:
        reason = self._offered.left_out.get("forward" if method is None else method)
        if method is None:
            message = f"the model {self.name} has no default method that is served"
            message += f": forward {reason}" if reason else ""
        else:
            message = f"the method {shown(method)} of {self.name} is not served"
            message += f": it {reason}" if reason else ""
        methods, names = ", ".join(self.models), ", ".join(self.names)
        hint = f"Its methods are {methods}: by the parameter `method`, or the names {names}."
        return NotServedError(message, hint=hint)

    @property
    def package(self) -> ServedPackage:
        """Itself."""
        return self

    # --- as ServedModel -----------------------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """The names under which it answers."""
        return [model.name for model in self.models.values()]

    @property
    def ready(self) -> bool:
        """Whether all methods are ready."""
        return all(model.ready for model in self.models.values())

    def admit(self, size: int, *, waits: bool = False) -> AbstractContextManager[None]:
        """Reserves room for a body: see `ServedModel.admit`. All methods leave and lose their process together."""
        return next(iter(self.models.values())).admit(size, waits=waits)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers a request by the method that it names. Raises a ServeError."""
        return await self.chosen(self.name, request.method).infer(request)

    def give_up(self, step: SequenceStep) -> None:
        """See `ServedModel.give_up`. The methods share their sequences."""
        for model in self.models.values():
            model.give_up(step)

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
