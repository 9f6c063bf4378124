"""The methods of a load of a package as one: the package's name stands for the method that a request names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from exportkit.serve.engine.loading import LoadedPackage
from exportkit.serve.engine.package_load import PackageLoad
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, SequenceStep


class ServedPackage(PackageLoad[ServedModel]):
    """What is served of one load of a package.

    Where no method has the package's name, it stands for them: it takes what `ServedModel` takes, and gives it to the
    method that is named.

    Attributes:
        body_rules: What the body of a request to the package may hold.
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
        super().__init__(name, loaded, sequences)
        self.models = {
            each.method: ServedModel(each, self, counted(each.name, each.version)) for each in loaded.methods
        }
        rules = {method: model.body_rules for method, model in self.models.items()}
        largest = max(each.max_bytes for each in rules.values())
        self.body_rules = BodyRules((), (), batched=False, max_bytes=largest, name=name, methods=rules)
        for model in self.models.values():
            if model.name == name:
                model.body_rules = replace(model.body_rules, methods=rules)

    def admit(self, size: int, *, waits: bool = False) -> AbstractContextManager[None]:
        """Reserves room for a body: see `ServedModel.admit`."""
        load = self.newest() if self.closed else self
        return next(iter(load.models.values())).admit(size, waits=waits)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answers a request by the method that it names. Raises a ServeError."""
        return await self.model_for(self.name, request).answer(request)

    def cancel(self, step: SequenceStep) -> None:
        """See `ServedModel.cancel`."""
        if self.sequences is not None:
            self.sequences.cancel(step)

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
