"""Runs a package in a worker process, so that a crash there cannot take this process down."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from exportkit.child.messages import Failed
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import DigestMismatchError, ModelClosedError, ModelLoadError, ModelRunError, UsageError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.trust import demand
from exportkit.runtime.inputs import InputPlan
from exportkit.runtime.isolated_messages import Connect, LoadPackage, PackageLoaded, Ran, Run, Swap, TorchSettings
from exportkit.runtime.model import Model
from exportkit.runtime.targets import named
from exportkit.runtime.tensor_socket import TensorSocket
from exportkit.runtime.weights import WeightsSource, read_state

_Outcome = list[torch.Tensor] | BaseException
_Job = tuple[Callable[[], list[torch.Tensor]], SimpleQueue[_Outcome]]
_Control = TensorSocket[PackageLoaded | Failed]
_Calls = TensorSocket[Ran | Failed]

_EXIT_GRACE_SECONDS = 60.0  # at most, between a worker's sockets closing and its return code


class IsolatedModel(Model):
    """A package, loaded in a worker process; call it as the module it was made from.

    Inputs are checked here, before they are sent. Outputs are contiguous. Where the worker ends by itself, calls that
    are running raise a ModelRunError that says how, and later ones a ModelClosedError: no other worker takes its place.

    `pid` is that of the worker process.
    """

    def __init__(self, reader: PackageReader, target: package.Target, plan: InputPlan, runner: IsolatedRunner) -> None:
        """Takes over the open package and the worker; `exportkit.load(..., isolate=True)` is how to get here."""
        super().__init__(reader, target, plan, runner)
        self.pid = runner.pid
        self._worker = runner

    def close(self, timeout: float = 30.0) -> None:
        """Ends the worker. Calls that have begun in other threads finish first, within `timeout` seconds.

        Then the worker is killed, and they raise a ModelRunError.
        """
        super().close()
        self._worker.close(timeout)

    def swap_weights(self, source: WeightsSource) -> None:
        """As `Model.swap_weights`, in the worker: it reads the file, or is sent copies of the tensors."""
        self._worker.swap_weights(source)


class IsolatedRunner:
    """Compiled code in a worker process, for any number of threads of this one."""

    def __init__(self, name: str, process: ChildProcess, control: _Control, device: torch.device, runners: int) -> None:
        """Takes over a worker that has loaded the model of this name."""
        self.pid = process.pid
        self._name = name
        self._process = process
        self._control = control
        self._device = device
        self._idle: deque[_Calls] = deque()
        self._free = threading.BoundedSemaphore(runners)
        self._state = threading.Condition()
        self._running = 0  # calls that have begun
        self._closed_reason: str | None = None  # why no more can
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        for _ in range(runners):
            threading.Thread(target=_serve, args=(self._jobs,), name="exportkit calls", daemon=True).start()
        self._release = weakref.finalize(self, _release, process, control, self._idle, self._jobs, runners)

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows.

        Raises:
            RuntimeError: The compiled code failed.
            ModelRunError: The worker ended, or there is no memory for the tensors to share with it.
            ModelClosedError: It had ended before.
        """
        return self._run_off_main_thread(partial(self._call, inputs))

    def _call(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._in_flight(), self._free:
            return self._ask(Run(), inputs)

    def swap_weights(self, source: WeightsSource) -> None:
        """Has the worker run with other weights; errors are those of `Model.swap_weights` and of `run`."""
        with self._in_flight():
            if isinstance(source, (str, os.PathLike)):
                self._ask(Swap(path=os.path.abspath(source), names=()), [], keep=False)
                return
            # The memory they are sent through is let go with the connection.
            state = read_state(source)
            self._ask(Swap(path=None, names=tuple(state)), list(state.values()), keep=False)

    def _run_off_main_thread(self, call: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Makes a call where no signal can interrupt it.

        A signal's handler may raise in the main thread, between any two steps of Python: a runner that was just
        taken would never be given back. So another thread takes those steps, and the main one waits, holding nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return call()
        self._check_ours()  # the other thread is not in a fork
        if self._closed_reason is not None:
            raise self._closed()
        answers: SimpleQueue[_Outcome] = SimpleQueue()
        self._jobs.put((call, answers))
        outcome = None
        while outcome is None:
            try:
                outcome = answers.get(timeout=_EXIT_GRACE_SECONDS)
            except Empty:
                if not self._release.alive:  # closed just now: nobody is there to answer
                    raise self._closed() from None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self, timeout: float) -> None:
        """Ends the worker once no call is running, or after `timeout` seconds."""
        if not self._process.is_ours:
            return
        with self._state:
            self._closed_reason = self._closed_reason or "was closed"
            if not self._state.wait_for(lambda: self._running == 0, timeout):
                self._closed_reason = f"was closed, and this call had not finished {timeout:g} s later"
        self._release()

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """A call, which close() waits for."""
        self._check_ours()
        with self._state:
            if self._closed_reason is not None:
                raise self._closed()
            self._running += 1
        try:
            yield
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def _check_ours(self) -> None:
        if not self._process.is_ours:
            raise UsageError(
                f"the model {self._name} belongs to the process that loaded it; this one is a fork of that",
                hint="Load the package in the process that calls it.",
            )

    def _closed(self) -> ModelClosedError:
        return ModelClosedError(f"the model {self._name} {self._closed_reason}", hint="Load the package again.")

    def _ask(self, message: Run | Swap, tensors: list[torch.Tensor], *, keep: bool = True) -> list[torch.Tensor]:
        """Sends a message with tensors; the tensors of the answer, which are the caller's own."""
        with contextlib.ExitStack() as undo:
            try:
                calls = (self._idle_connection() if keep else None) or self._connect()
                # Unless the call comes to its end: its answer may be on its way, and the next call's it is not.
                undo.callback(calls.close)
                calls.send(message, tensors)
                answer, received, _ = calls.receive()
                outputs = [tensor.to(self._device, copy=True) for tensor in received]
            except (ConnectionError, ValueError) as error:
                raise self._worker_exited() from error
            except OSError as error:
                if not self._release.alive:  # this call waited for a runner until close() had waited long enough
                    raise self._worker_exited() from error
                raise ModelRunError(
                    f"a call's tensors cannot be shared with the worker process: {error}",
                    hint="They take anonymous memory (memfd) and a few open files; /dev/shm is not used.",
                ) from error
            if keep:
                undo.pop_all()
                self._idle.append(calls)
        if isinstance(answer, Failed):
            raise answer.exception()
        return outputs

    def _idle_connection(self) -> _Calls | None:
        with self._state:
            return self._idle.pop() if self._idle else None

    def _connect(self) -> _Calls:
        """A connection for one call at a time."""
        ours, theirs = socket.socketpair()
        with theirs:
            calls: _Calls = TensorSocket(ours, Ran | Failed)
            try:
                with self._state:
                    self._control.send(Connect(), pass_fd=theirs.fileno())
            except BaseException:
                calls.close()
                raise
        return calls

    def _worker_exited(self) -> ModelRunError:
        """Why the worker does not answer any more."""
        status = self._process.wait(_EXIT_GRACE_SECONDS)
        with self._state:
            if self._closed_reason is None:
                self._process.end()
                how = "gave no answer that can be read" if status is None else describe_end(status)
                self._closed_reason = f"has no worker process any more: it {how}"
            return ModelRunError(
                f"the model {self._name} {self._closed_reason}",
                hint="What it said last is on stderr. Load the package again.",
            )


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """Makes the main thread's calls; keeps nothing of one that is over."""
    while (job := jobs.get()) is not None:
        call, answers = job
        try:
            answers.put(call())
        except BaseException as error:  # the caller's to handle
            answers.put(error)
        del job, call, answers


def _release(
    process: ChildProcess,
    control: _Control,
    idle: deque[_Calls],
    jobs: SimpleQueue[_Job | None],
    runners: int,
) -> None:
    """Also of a runner that nobody closed, when it is collected or the interpreter ends."""
    for _ in range(runners):
        jobs.put(None)
    process.end()
    control.close()
    while idle:
        idle.pop().close()


def load_isolated(path: str | os.PathLike[str], *, runners: int, **options: Any) -> IsolatedModel:
    """`exportkit.load` with `isolate=True`: its arguments and errors; HostError where no process is to be had."""
    passed = {name: _plain(name, value) for name, value in options.items()}
    with contextlib.ExitStack() as undo:
        asked = demand(options.get("public_key"), options.get("signature"))
        reader = undo.enter_context(PackageReader(Path(path), demand=asked))
        process = ChildProcess("exportkit.runtime.isolated_worker")
        undo.callback(process.end)
        control: _Control = TensorSocket(process.connection, PackageLoaded | Failed)
        loaded = _load(control, process, reader, {**passed, "runners": runners})
        plan = InputPlan(reader.manifest.call, torch.device(loaded.device))
        (target,) = named(reader.manifest.targets, loaded.target)
        runner = IsolatedRunner(reader.manifest.name, process, control, plan.device, runners)
        undo.pop_all()
    return IsolatedModel(reader, target, plan, runner)


def _load(control: _Control, process: ChildProcess, reader: PackageReader, options: dict[str, Any]) -> PackageLoaded:
    """Has the worker load the package that is open here."""
    try:
        control.send(LoadPackage(path=os.path.abspath(reader.path), options=options, settings=TorchSettings.current()))
        answer, _, _ = control.receive()
    except ConnectionError as error:
        status = process.wait(_EXIT_GRACE_SECONDS)
        how = "closed the connection" if status is None else describe_end(status)
        raise ModelLoadError(
            f"the worker process {how} while it loaded {reader.path.name}", hint="What it said last is on stderr."
        ) from error
    if isinstance(answer, Failed):
        failure = answer.exception()
        if isinstance(failure, RuntimeError):
            raise ModelLoadError(f"the worker process could not load {reader.path.name}: {failure}")
        raise failure
    if answer.manifest_sha256 != reader.manifest_sha256:
        raise DigestMismatchError(
            f"{reader.path.name} was replaced by another package while it was loaded", hint="Load it again."
        )
    return answer


def _plain(name: str, value: Any) -> Any:
    """An argument of `load` as JSON can hold it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (os.PathLike, torch.device)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    raise UsageError(
        f"`{name}` is a {type(value).__qualname__}, which cannot be passed on to a worker process",
        hint="Give text, a number or a path, or load without isolate=True.",
    )
