"""A repository whose models answer with their inputs: at once, or when a test lets them. It needs no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from exportkit.serve.engine.repository import IndexEntry
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InferTiming, OutputTensor, SequenceStep
from exportkit.serve.statuses import (
    BackendError,
    DeadlineError,
    NotReadyError,
    NotServedError,
    QueueFullError,
)

Compute = Callable[[InferRequest], Sequence[OutputTensor]]


def echo(request: InferRequest) -> list[OutputTensor]:
    """Returns each input under the same name."""
    wanted = [each for each in request.inputs if request.outputs is None or each.name in request.outputs]
    return [OutputTensor(each.name, each.datatype, each.shape, each.data) for each in wanted]


class EchoModel:
    """A model. After `hold`, requests wait for `release`. `Remembers` keeps sequences.

    Attributes:
        requests: What it was asked.
        reserved: The bytes for which room was asked; it has `room`, of which `held` are taken.
        running, cancelled: The number of requests that wait to be released, and of those that were cancelled.
        failure: What `infer` raises.
    """

    version = "1"
    stateful = False

    def __init__(
        self, name: str = "echo", datatype: str = "FP32", max_body: int = 64 << 20, compute: Compute = echo
    ) -> None:
        self.name, self.max_body, self.compute = name, max_body, compute
        self.names = [name]
        self.ready = True
        self.requests: list[InferRequest] = []
        self.reserved: list[int] = []
        self.held, self.room = 0, 1 << 50
        self.running = self.cancelled = 0
        self.failure: Exception | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tensors = [{"name": "x", "datatype": datatype, "shape": [-1]}]
        self.body_rules = BodyRules.of(self.metadata(), max_body)

    def hold(self) -> None:
        """Lets requests wait."""
        self._gate.clear()

    def release(self) -> None:
        """Lets requests pass, in whichever loop they wait."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._gate.set)

    @contextmanager
    def admit(self, size: int, *, waits: bool = False) -> Iterator[None]:
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
        self.requests.append(request)
        self.running += 1
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(self._gate.wait(), request.timeout)
        except TimeoutError:
            raise DeadlineError("the request's timeout passed while it waited") from None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.failure is not None:
            raise self.failure
        outputs = tuple(self.compute(request))
        return InferAnswer(self.name, self.version, request.id, outputs, InferTiming(0.0, 0.0, 0.0, 0.0, 1))

    def metadata(self) -> dict[str, Any]:
        batching = {"enabled": False, "reason": "it is a double"}
        found = {"name": self.name, "versions": ["1"], "inputs": self._tensors, "outputs": self._tensors}
        return found | {"batching": batching} | ({"sequences": {}} if self.stateful else {})

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "max_batch_size": 4}

    def statistics(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "inference_stats": {"success": {"count": 1, "ns": 5}}}


class Remembers(EchoModel):
    """A model with state."""

    stateful = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.given_up: list[SequenceStep] = []

    def cancel(self, step: SequenceStep) -> None:
        self.given_up.append(step)


class EchoRepository:
    """The models, as `exportkit.serve.engine.repository.Repository` has them. `asked` has what was loaded and unloaded.

    After `loading.clear()`, loads wait.
    """

    def __init__(self, *models: EchoModel) -> None:
        self._models = {model.name: model for model in models or [EchoModel()]}
        self.draining = False
        self.lost: str | None = None
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self.loading = asyncio.Event()
        self.loading.set()

    @property
    def ready(self) -> bool:
        return not self.draining and all(model.ready for model in self._models.values())

    def model(self, name: str, version: str = "", method: str | None = None) -> EchoModel:
        if name not in self._models or version not in ("", "1"):
            raise NotServedError(f"no model {name} {version}")
        if self.draining:
            raise NotReadyError("the server drains")
        return self._models[name]

    named = model

    def models(self) -> list[EchoModel]:
        return list(self._models.values())

    def index(self) -> list[IndexEntry]:
        states = [IndexEntry(name, "1", "READY", "") for name in self._models]
        return [*states, IndexEntry("broken", "1", "UNAVAILABLE", "the file is truncated")]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        await self.loading.wait()
        if name == "broken":
            raise BackendError("the file is truncated")
        self.asked.append(("load", name, dict(parameters)))

    async def unload(self, name: str) -> None:
        self.model(name)
        self.asked.append(("unload", name, {}))


def break_down(request: InferRequest) -> list[OutputTensor]:
    raise ZeroDivisionError("a secret of the implementation")


def repository() -> EchoRepository:
    """A large model, a small one, and one that fails."""
    return EchoRepository(
        EchoModel("echo", max_body=32 << 20),
        EchoModel("small", "UINT8", 1000),
        EchoModel("broken down", max_body=1000, compute=break_down),
    )
