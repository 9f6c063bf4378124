"""Runs a package in a worker process, so that a crash there cannot take this process down."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from exportkit.child.messages import Failed
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import DigestMismatchError, ModelLoadError, UsageError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.package_source import PackageSource
from exportkit.package.trust import demand
from exportkit.runtime.isolated_code import WorkerRunner, WorkerState
from exportkit.runtime.isolated_messages import LoadPackage, PackageLoaded, TorchSettings, TryRows
from exportkit.runtime.isolated_process import EXIT_GRACE_SECONDS, Control, Worker
from exportkit.runtime.methods import ModelCode, plan_methods
from exportkit.runtime.model import Model
from exportkit.runtime.requests import TriedRows
from exportkit.runtime.state import State
from exportkit.runtime.targets import named
from exportkit.runtime.tensor_socket import TensorSocket
from exportkit.runtime.weights import WeightsSource


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

    Raises:
        HostError: The worker process cannot be started. Other errors are the same as for `exportkit.load`.
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
    raise UsageError(
        f"`{name}` is a {type(value).__qualname__}, which cannot be passed on to a worker process",
        hint="Give text, a number or a path, or load without isolate=True.",
    )
