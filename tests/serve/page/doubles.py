"""A repository of models that only say what they are, for tests of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exportkit.package import manifest as m
from exportkit.serve.engine.statistics import Statistics
from tests.runtime import tiny

BATCHED = {"enabled": True, "reason": None, "dimension": "batch", "max_rows": 4, "bit_equal": True}


@dataclass
class Model:
    """A model with a call, that of tests.runtime.tiny unless another is given."""

    name: str = "tiny"
    version: str = "1"
    call: m.Call = field(default_factory=tiny.call)
    ready: bool = True
    failure: str | None = None
    devices: tuple[str, ...] = ("cpu",)
    counted: Statistics = field(default_factory=Statistics)

    def metadata(self) -> dict[str, Any]:
        return {"batching": BATCHED}


@dataclass
class Models:
    loaded: Sequence[Model]
    ready: bool = True
    draining: bool = False

    def models(self) -> Sequence[Model]:
        return self.loaded

    def model(self, name: str, version: str = "") -> Model:
        (found,) = (each for each in self.loaded if (each.name, each.version) == (name, version))
        return found

    named = model
