"""A repository of models that only say what they are, for tests of the page's routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exportkit.package import manifest as m
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.repository import IndexEntry
from exportkit.serve.engine.servable import Servable
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.http_request import BodyRules
from tests.runtime import tiny


def manifest(call: m.Call | None = None) -> m.Manifest:
    """A manifest with a call, that of tests.runtime.tiny unless another is given."""
    return m.Manifest(
        format_version=m.FORMAT_VERSION,
        name="tiny",
        version="1",
        methods=tiny.forward(call or tiny.call()),
        targets=(tiny.target(),),
        program=None,
        operators=(),
        libraries=(),
        cases=(),
        source=m.Source(model=None, model_kwargs={}, dtype=None, seed=0, state_sha256="0" * 64),
        provenance=m.Provenance(exportkit="0", torch="0", commit=None, dirty=None, tf32=False),
        records=(),
    )


ALONE = Batching.impossible("the test does not need it")


@dataclass
class Model:
    name: str = "tiny"
    version: str = "1"
    manifest: m.Manifest = field(default_factory=manifest)
    ready: bool = True
    max_body: int = 1000
    counted: Statistics = field(default_factory=Statistics)

    devices: tuple[str, ...] = ("cpu",)
    batching: Batching = ALONE
    failure: str | None = None
    sequences: ServedSequences | None = None

    @property
    def described(self) -> ModelDescription:
        return ModelDescription(
            name=self.name,
            version=self.version,
            manifest=self.manifest,
            batching=self.batching,
            limits=BatchLimits(),
            devices=self.devices,
            runners=1,
            weights=None,
            method=self.manifest.method().name,
            offered=Servable({}, {}),
        )

    @property
    def call(self) -> m.Call:
        return self.manifest.call

    def metadata(self) -> dict[str, Any]:
        return self.described.metadata()

    @property
    def body_rules(self) -> BodyRules:
        return BodyRules.of(self.metadata(), self.max_body)

    def config(self) -> dict[str, Any]:
        return self.described.config()


@dataclass
class Models:
    loaded: Sequence[Model]
    others: Sequence[IndexEntry] = ()
    ready: bool = True
    draining: bool = False

    def models(self) -> Sequence[Model]:
        return self.loaded

    def model(self, name: str, version: str = "") -> Model:
        (found,) = (each for each in self.loaded if (each.name, each.version) == (name, version))
        return found

    named = model

    def index(self) -> Sequence[IndexEntry]:
        return [*(IndexEntry(each.name, each.version, "READY", "") for each in self.loaded), *self.others]


def region_call(**changes: Any) -> m.Call:
    """A call such as ARR-COC's, with some of its keys changed."""
    batch, rows, columns = (m.Size(dimension=name, scale=scale) for name, scale in (("b", 1), ("gh", 14), ("gw", 14)))
    tolerance = m.OutputTolerance(rtol=0, atol=0)
    sizes = {
        "features": ("float32", (batch, None, 8)),
        "indices": ("int64", (batch, None)),
        "budgets": ("int64", (batch, None)),
        "scores": ("float32", (batch, None)),
        "relevance": ("float32", (batch, None)),
    }
    outputs = tuple(
        m.TensorOutput(name=name, dtype=dtype, shape=shape, tolerance=tolerance)
        for name, (dtype, shape) in sizes.items()
    )
    inputs = (
        m.TensorInput(name="picture", dtype="float32", shape=(batch, 3, rows, columns), written=None),
        m.TensorInput(name="wanted", dtype="float32", shape=(batch, 8), written=None),
    )
    call = m.Call(
        parameters=tuple(
            m.Parameter(name=each.name, kind="positional", value=m.TensorNode(index=index))
            for index, each in enumerate(inputs)
        ),
        inputs=inputs,
        result=m.MappingNode(keys=tuple(sizes), items=tuple(m.TensorNode(index=index) for index in range(len(sizes)))),
        outputs=outputs,
        dimensions=tuple(m.Dimension(name=name, min=1, max=64) for name in ("b", "gh", "gw")),
    )
    return msgspec.structs.replace(call, **changes)
