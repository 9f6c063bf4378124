"""The models, as a client sees them whose API key is for some of them: the others do not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_package import Named
from exportkit.serve.protocol.inference import SequenceStart
from exportkit.serve.protocol.seen_methods import check_method, sees_model
from exportkit.serve.statuses import ForbiddenError
from exportkit.serve.tenants.key_rules import KeyRules, Sees

State = Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


@dataclass(frozen=True)
class IndexEntry:
    """A version of a model in the repository. `reason` says why it is not ready."""

    name: str
    version: str
    state: State
    reason: str


class AllModels(Protocol):
    """What is shown of a repository: `Repository` says what each does."""

    @property
    def ready(self) -> bool:
        """Whether the server is."""

    @property
    def draining(self) -> bool:
        """Whether the server does."""

    def named(self, name: str, version: str = "", *, sees: Sees) -> Named:
        """Returns a model, or a package that has no default method."""

    def model(self, name: str, version: str = "", method: str | None = None, *, sees: Sees) -> ServedModel:
        """Returns a model, or the method of a package."""

    def models(self) -> Sequence[ServedModel]:
        """Returns every version that is loaded."""

    def index(self, *, sees: Sees) -> Sequence[IndexEntry]:
        """Returns what there is, loaded or not."""

    def check_start(self, start: SequenceStart, models: Sequence[ServedModel], /) -> None:
        """Refuses a sequence if none of the models has room for it."""


class VisibleModels:
    """What a client may see of a repository. Refusals are those of names that nothing has."""

    def __init__(self, repository: AllModels, rules: KeyRules) -> None:
        """Sees what the rules allow."""
        self._repository = repository
        self._rules = rules

    @property
    def ready(self) -> bool:
        """Whether the server is."""
        return self._repository.ready

    @property
    def draining(self) -> bool:
        """Whether the server does."""
        return self._repository.draining

    def named(self, name: str, version: str = "") -> Named:
        """See `Repository.named`."""
        return self._repository.named(name, version, sees=self._rules.sees)

    def model(self, name: str, version: str = "", method: str | None = None) -> ServedModel:
        """See `Repository.model`."""
        check_method(self._rules, self.named(name, version), method)
        return self._repository.model(name, version, method, sees=self._rules.sees)

    def models(self) -> Sequence[ServedModel]:
        """See `Repository.models`."""
        return [model for model in self._repository.models() if sees_model(self._rules, model)]

    def index(self) -> Sequence[IndexEntry]:
        """See `Repository.index`."""
        return self._repository.index(sees=self._rules.sees)

    def check_start(self, start: SequenceStart) -> None:
        """See `Repository.check_start`."""
        self._repository.check_start(start, self.models())

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Refuses it: others may use the model. Whether there is one is not told."""
        self._refuse()

    async def unload(self, name: str) -> None:
        """Likewise."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ForbiddenError("this API key may not load or unload models", hint="It is for some models only.")
