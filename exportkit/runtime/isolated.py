"""Runs a package in a worker process, so that a crash there cannot take this process down."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from exportkit.child.messages import Failed
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import DigestMismatchError, ModelLoadError, UsageError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.package_source import PackageSource
from exportkit.package.trust import demand
from exportkit.runtime.isolated_messages import (
    AccessState,
    Capture,
    LoadPackage,
    MakeSession,
    PackageLoaded,
    ReportGraphs,
    Run,
    TorchSettings,
    TryRows,
)
from exportkit.runtime.isolated_process import EXIT_GRACE_SECONDS, Control, Requests, Worker
from exportkit.runtime.methods import MethodPlan, ModelCode, plan_methods
from exportkit.runtime.model import Model
from exportkit.runtime.requests import Answers, TriedRows
from exportkit.runtime.runner import Runner
from exportkit.runtime.state import State
from exportkit.runtime.targets import named
from exportkit.runtime.tensor_socket import TensorSocket
from exportkit.runtime.weights import WeightsSource
from exportkit.sizes import sizes_of


class IsolatedModel(Model):
    """A package that runs in a worker process. Call it like the exported module.

    Inputs are checked here, before they are sent. Outputs are contiguous. The state of sessions is in the worker, and
    what a call writes into inputs is copied back. If the worker dies, running calls raise a ModelRunError that says
    how, later calls raise a ModelClosedError, and its sessions are broken. The worker is not restarted.

    Attributes:
        pid: The worker's process id.
    """

    def __init__(self, reader: PackageReader, target: package.Target, code: ModelCode, worker: Worker) -> None:
        """Takes over the open package and the worker. Use `exportkit.load(..., isolate=True)`."""
        super().__init__(reader, target, code)
        self.pid = worker.pid
        self._worker = worker

    @property
    def alive(self) -> bool:
        """Whether the worker runs and takes calls. It may have died while no call was there to notice."""
        return super().alive and self._worker.alive

    def close(self, timeout: float = 30.0) -> None:
        """Ends the worker after the running calls of other threads, and with it the state of all sessions.

        Args:
            timeout: Seconds to wait for these calls. After that, the worker is killed and they raise a ModelRunError.
        """
        super().close()
        self._worker.close(timeout)

    def try_rows(self, method: str, most: int) -> TriedRows:
        """See `Model.try_rows`."""
        return self._worker.ask(TryRows(method, most), [])[0].rows

    def use_own_stream(self) -> None:
        """Does nothing: each of the worker's threads has a stream."""

    def swap_weights(self, source: WeightsSource) -> None:
        """Works like `Model.swap_weights`. The worker reads the file, or receives copies of the tensors."""
        self._worker.swap_weights(source)

    def _new_state(self, sizes: Mapping[str, int]) -> State:
        return WorkerState.new(self._code, self._worker, sizes)


def load_isolated(source: PackageSource, *, stream_limit: int, **options: Any) -> IsolatedModel:
    """Loads a package in a worker process: `exportkit.load` with `isolate=True`.

    HostError: the worker process cannot be started. Other errors are the same as for `exportkit.load`.
    """
    signature = options["signature"]
    content = signature if isinstance(signature, bytes) else None
    passed = {name: _plain(name, value) for name, value in options.items() if value is not content}
    with contextlib.ExitStack() as undo:
        asked = demand(options["public_key"], signature)
        reader = undo.enter_context(PackageReader(source, demand=asked, stream_limit=stream_limit))
        process = ChildProcess("exportkit.runtime.isolated_worker")
        undo.callback(process.end)
        control: Control = TensorSocket(process.connection, PackageLoaded | Failed)
        loaded = _load(control, process, reader, passed, content)
        device = torch.device(loaded.device)
        plans = plan_methods(reader.manifest, device)
        (target,) = named(reader.manifest.targets, loaded.target)
        worker = Worker(reader.manifest.name, process, control, device, options["runners"])
        code = ModelCode(reader, plans, device, {name: WorkerRunner(worker, plan) for name, plan in plans.items()})
        undo.pop_all()
    return IsolatedModel(reader, target, code, worker)


def _load(
    control: Control, process: ChildProcess, reader: PackageReader, options: dict[str, Any], signature: bytes | None
) -> PackageLoaded:
    """Makes the worker load the package that is open here: by its path, beside which a signature may lie, or as it is.

    What was copied into memory is there once, for both processes.
    """
    path = os.path.abspath(reader.path) if reader.has_path else None
    message = LoadPackage(path, options, TorchSettings.current(), signature)
    try:
        control.send(message, pass_fd=reader.fileno() if path is None else None)
        answer, _, _ = control.receive()
    except ConnectionError as error:
        status = process.wait(EXIT_GRACE_SECONDS)
        how = "closed the connection" if status is None else describe_end(status)
        raise ModelLoadError(
            f"the worker process {how} while it loaded {reader.name}", hint="Its last output is on stderr."
        ) from error
    if isinstance(answer, Failed):
        failure = answer.exception()
        if isinstance(failure, RuntimeError):
            raise ModelLoadError(f"the worker process could not load {reader.name}: {failure}")
        raise failure
    if answer.manifest_sha256 != reader.manifest_sha256:
        raise DigestMismatchError(
            f"{reader.name} was replaced by another package while it was loaded", hint="Load it again."
        )
    return answer


def _plain(name: str, value: Any) -> Any:
    """Converts an argument of `load` to JSON values."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (os.PathLike, torch.device)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    said = f"`{name}` is a {type(value).__qualname__}, which cannot be passed on to a worker process"
    raise UsageError(said, hint="Give text, a number or a path, or load without isolate=True.")


class WorkerRunner(Runner):
    """The compiled code of a method in a worker process, which looks at every call before it answers."""

    def __init__(self, worker: Worker, plan: MethodPlan) -> None:
        """Runs a method of the worker's package."""
        self._worker = worker
        self._plan = plan

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """Returns the flat outputs for flat, valid inputs of a method without state. Raises the errors of `ask`."""
        return run_in_worker(self._worker, self._plan, None, inputs)

    def run_requests(self, requests: Requests, outputs: Sequence[int], /) -> Answers:
        """See `Runner.run_requests`."""
        return self._worker.run_requests(self._plan.name, requests, outputs)

    def capture(self, arguments: list[torch.Tensor], own: int, /) -> list[torch.Tensor] | None:
        """See `Runner.capture`. The graph's own inputs are the worker's, and a call with any inputs copies to them."""
        sizes = sizes_of(self._plan.described, [tensor.shape for tensor in arguments])
        answer, _ = self._worker.ask(Capture(self._plan.name, sizes), arguments[:own])
        return arguments[:own] if answer.graphs else None

    def graph_report(self) -> str | None:
        """See `Runner.graph_report`."""
        return self._worker.ask(ReportGraphs(self._plan.name), [])[0].report


class WorkerState:
    """State in a worker process. One caller at a time may use it."""

    def __init__(self, code: ModelCode, worker: Worker, number: int) -> None:
        """Takes over a session of the worker. The worker frees it once this object is gone."""
        self._code = code
        self._worker = worker
        self._number = number
        self._names = [each.name for each in code.manifest.state]
        self._end = weakref.finalize(self, worker.ended_sessions.append, number)
        self._end.atexit = False

    @classmethod
    def new(cls, code: ModelCode, worker: Worker, sizes: Mapping[str, int]) -> WorkerState:
        """Makes the state of a new session."""
        answer, _ = worker.ask(MakeSession(dict(sizes)), [])
        return cls(code, worker, answer.session)

    @property
    def alive(self) -> bool:
        """Whether the worker lives, and has the state."""
        return self._end.alive and self._worker.alive

    def check(self, plan: MethodPlan, inputs: Sequence[torch.Tensor], /) -> None:
        """Nothing here shares memory with the worker's state."""

    def run(self, plan: MethodPlan, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """See `State.run`."""
        return self._code.run(plan, partial(run_in_worker, self._worker, plan, self._number), inputs)

    def refused(self, /) -> None:
        """The worker looks at every call before it answers."""

    def fork(self, /) -> WorkerState:
        """See `State.fork`."""
        answer, _ = self._worker.ask(MakeSession({}, copy_of=self._number), [])
        return WorkerState(self._code, self._worker, answer.session)

    def reset(self, /) -> None:
        """See `State.reset`."""
        self._worker.ask(AccessState(self._number, "reset"), [])

    def tensors(self, /) -> dict[str, torch.Tensor]:
        """See `State.tensors`. They are copies."""
        return dict(zip(self._names, self._worker.ask(AccessState(self._number, "read"), [])[1]))

    def replace(self, tensors: Mapping[str, torch.Tensor], row: int | None = None, /) -> None:
        """See `State.replace`."""
        self._worker.ask(AccessState(self._number, "write", tuple(tensors), row), list(tensors.values()))

    def close(self, /) -> None:
        """See `State.close`."""
        self._end()
        self._worker.close_sessions()


def run_in_worker(
    worker: Worker, plan: MethodPlan, session: int | None, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a method in the worker, and copies what it wrote into the inputs."""
    _, received = worker.ask(Run(plan.name, session), inputs)
    places = plan.inputs.written
    outputs, written = received[: len(received) - len(places)], received[len(received) - len(places) :]
    with torch.no_grad():
        for place, tensor in zip(places, written):
            inputs[place].copy_(tensor)
    return outputs
