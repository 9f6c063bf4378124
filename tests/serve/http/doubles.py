"""A repository whose models are functions of bytes: they answer at once, or when a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from exportkit.serve.engine.repository import IndexEntry
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import (
    InferAnswer,
    InferRequest,
    InferTiming,
    OutputTensor,
    SequenceStep,
)
from exportkit.serve.statuses import (
    BackendError,
    BadRequestError,
    DeadlineError,
    NotReadyError,
    NotServedError,
    QueueFullError,
)

Compute = Callable[[InferRequest], Sequence[OutputTensor]]


def echo(request: InferRequest) -> list[OutputTensor]:
    """Returns each input under the same name."""
    wanted = request.outputs or [each.name for each in request.inputs]
    return [
        OutputTensor(each.name, each.datatype, each.shape, each.data) for each in request.inputs if each.name in wanted
    ]


def break_down(request: InferRequest) -> list[OutputTensor]:
    raise ZeroDivisionError("a secret of the implementation")


class FakeModel:
    """A model. After `hold`, requests wait for `release`. `Remembers` keeps sequences."""

    version = "1"
    stateful = False

    def __init__(
        self, name: str, tensors: Mapping[str, tuple[str, list[int]]], max_body: int, compute: Compute = echo
    ) -> None:
        self.name = name
        self.names = [name]
        self.max_body = max_body
        self.compute = compute
        self.ready = True
        self.gate: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiting = self.cancelled = self.answered = 0
        self.reserved: list[int] = []  # the bytes for which room was asked
        self.held = 0
        self.room = 1 << 40
        self._tensors = tensors
        self.body_rules = BodyRules.of(self.metadata(), max_body)

    def hold(self) -> None:
        self.gate = asyncio.Event()

    def release(self) -> None:
        """Lets requests pass, in whichever loop they wait."""
        gate, self.gate = self.gate, None
        assert gate is not None
        if self.loop is not None:
            self.loop.call_soon_threadsafe(gate.set)

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        if not self.ready:
            raise NotReadyError(f"the model {self.name} drains")
        if self.held + size > self.room:
            raise QueueFullError("as many bytes wait as may")
        self.reserved.append(size)
        self.held += size
        try:
            yield
        finally:
            self.held -= size

    async def infer(self, request: InferRequest) -> InferAnswer:
        if request.timeout is not None and self.gate is not None:
            raise DeadlineError("the request would wait for longer than its timeout")
        for tensor in request.inputs:
            if tensor.name not in self._tensors:
                raise BadRequestError(f"the model has no input {tensor.name}")
        if self.gate is not None:
            self.loop = asyncio.get_running_loop()
            self.waiting += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.waiting -= 1
        outputs = tuple(self.compute(request))
        self.answered += 1
        return InferAnswer(self.name, self.version, request.id, outputs, InferTiming(0.0, 0.0, 0.0, 0.0, 1))

    def metadata(self) -> dict[str, Any]:
        described = [{"name": n, "datatype": t, "shape": shape} for n, (t, shape) in self._tensors.items()]
        batching = {"enabled": False, "reason": "it is a double"}
        found = {"name": self.name, "versions": ["1"], "inputs": described, "outputs": described, "batching": batching}
        return found | ({"sequences": {}} if self.stateful else {})

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "max_batch_size": 0}

    def statistics(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "inference_count": self.answered}


class Remembers(FakeModel):
    """A model with state."""

    stateful = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.given_up: list[SequenceStep] = []

    def cancel(self, step: SequenceStep) -> None:
        self.given_up.append(step)


class FakeRepository:
    """The models, as `exportkit.serve.engine.repository.Repository` has them."""

    def __init__(self, *models: FakeModel) -> None:
        self._models = {model.name: model for model in models}
        self.draining = False
        self.lost: str | None = None
        self.loaded: list[tuple[str, Mapping[str, Any]]] = []

    @property
    def ready(self) -> bool:
        return not self.draining

    def model(self, name: str, version: str = "") -> FakeModel:
        if name not in self._models or version not in ("", "1"):
            raise NotServedError(f"no model {name} {version}")
        return self._models[name]

    named = model

    def models(self) -> list[FakeModel]:
        return list(self._models.values())

    def index(self) -> list[IndexEntry]:
        states = [IndexEntry(name, "1", "READY", "") for name in self._models]
        return [*states, IndexEntry("broken", "1", "UNAVAILABLE", "the file is truncated")]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        if any(key.startswith("file:") for key in parameters):
            raise BadRequestError("a model is not loaded from a request")
        if name == "broken":
            raise BackendError("the file is truncated")
        self.loaded.append((name, parameters))

    async def unload(self, name: str) -> None:
        self.model(name)
