"""Runs a package in a worker process, so that a crash there cannot take this process down."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from exportkit.child.messages import Failed
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import DigestMismatchError, ModelClosedError, ModelLoadError, ModelRunError, UsageError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.trust import demand
from exportkit.runtime.inputs import InputPlan
from exportkit.runtime.isolated_messages import (
    Capture,
    Connect,
    LoadPackage,
    PackageLoaded,
    Question,
    Ran,
    ReportGraphs,
    Run,
    RunRequests,
    Swap,
    TorchSettings,
)
from exportkit.runtime.model import Model
from exportkit.runtime.requests import Answers
from exportkit.runtime.targets import named
from exportkit.runtime.tensor_socket import TensorSocket
from exportkit.runtime.weights import WeightsSource, read_state

T = TypeVar("T")

_Job = tuple[Callable[[], Any], SimpleQueue[Any]]  # the queue gets the result, or the exception
_Control = TensorSocket[PackageLoaded | Failed]
_Calls = TensorSocket[Ran | Failed]

EXIT_GRACE_SECONDS = 60.0  # at most, between a worker's sockets closing and its return code


class IsolatedModel(Model):
    """A package that runs in a worker process. Call it like the exported module.

    Inputs are checked here, before they are sent. Outputs are contiguous. If the worker dies, running calls raise a
    ModelRunError that says how, and later calls raise a ModelClosedError. The worker is not restarted.

    Attributes:
        pid: The worker's process id.
    """

    def __init__(self, reader: PackageReader, target: package.Target, plan: InputPlan, runner: IsolatedRunner) -> None:
        """Takes over the open package and the worker. Use `exportkit.load(..., isolate=True)`."""
        super().__init__(reader, target, plan, runner)
        self.pid = runner.pid
        self._worker = runner

    @property
    def alive(self) -> bool:
        """Whether the worker runs and takes calls. It may have died while no call was there to notice."""
        return super().alive and self._worker.alive

    def close(self, timeout: float = 30.0) -> None:
        """Ends the worker after the running calls of other threads.

        Args:
            timeout: Seconds to wait for these calls. After that, the worker is killed and they raise a ModelRunError.
        """
        super().close()
        self._worker.close(timeout)

    def use_own_stream(self) -> None:
        """Does nothing: each of the worker's threads has a stream."""

    def swap_weights(self, source: WeightsSource) -> None:
        """Works like `Model.swap_weights`. The worker reads the file, or receives copies of the tensors."""
        self._worker.swap_weights(source)


class IsolatedRunner:
    """Compiled code in a worker process. Any number of threads may call it."""

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

    @property
    def alive(self) -> bool:
        """Whether the worker runs and takes calls."""
        return self._closed_reason is None and self._process.wait(0) is None

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """Returns the flat outputs for flat, valid inputs.

        Raises:
            RuntimeError: The compiled code failed.
            ModelRunError: The worker died, or the shared memory for the tensors cannot be allocated.
            ModelClosedError: The worker had ended before the call.
        """
        return self._run_off_main_thread(partial(self._call, Run(), inputs))[1]

    def capture(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor] | None:
        """See `Runner.capture`. The graph's own inputs are the worker's, and a call with any inputs copies to them."""
        answer, _ = self._run_off_main_thread(partial(self._call, Capture(), inputs))
        return inputs if answer.graphs else None

    def graph_report(self) -> str | None:
        """See `Runner.graph_report`."""
        return self._run_off_main_thread(partial(self._call, ReportGraphs(), []))[0].report

    def _call(self, message: Question, inputs: list[torch.Tensor]) -> tuple[Ran, list[torch.Tensor]]:
        with self._in_flight(), self._free:
            return self._ask(message, inputs, self._device)

    def run_requests(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int], /) -> Answers:
        """Runs requests together. See `Model.run_requests`. Only the worker brings tensors to the device and back."""
        return self._run_off_main_thread(partial(self._call_for, requests, outputs))

    def _call_for(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int]) -> Answers:
        came = time.perf_counter()
        with self._in_flight(), self._free:
            started = time.perf_counter()
            tensors = [tensor for request in requests for tensor in request]
            message = RunRequests(len(requests), tuple(outputs))
            answer, received = self._ask(message, tensors, torch.device("cpu"))
            _, run_seconds, output_seconds = answer.seconds
            spent = time.perf_counter() - started
            input_seconds = spent - run_seconds - output_seconds
            return Answers(received, input_seconds, started - came, run_seconds, output_seconds)

    def swap_weights(self, source: WeightsSource) -> None:
        """Replaces the worker's weights. Raises the errors of `Model.swap_weights` and `run`."""
        with self._in_flight():
            if isinstance(source, (str, os.PathLike)):
                self._ask(Swap(path=os.path.abspath(source), names=()), [], self._device, keep=False)
                return
            # The connection is closed afterwards, which frees the shared memory.
            state = read_state(source)
            self._ask(Swap(path=None, names=tuple(state)), list(state.values()), self._device, keep=False)

    def _run_off_main_thread(self, call: Callable[[], T]) -> T:
        """Makes a call in a thread that no signal can interrupt.

        A signal handler may raise between any two steps of the main thread, so a runner that it just took would never
        be returned. Another thread makes the call instead, and the main thread only waits.
        """
        if threading.current_thread() is not threading.main_thread():
            return call()
        self._check_ours()  # a fork does not have the other thread
        if self._closed_reason is not None:
            raise self._closed()
        answers: SimpleQueue[T | BaseException] = SimpleQueue()
        self._jobs.put((call, answers))
        outcome: T | BaseException | None = None
        while outcome is None:
            try:
                outcome = answers.get(timeout=EXIT_GRACE_SECONDS)
            except Empty:
                if not self._release.alive:  # closed meanwhile, so no answer will come
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
                self._closed_reason = f"was closed, and this call did not finish within {timeout:g} s"
        self._release()

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Counts a call, so that close() waits for it."""
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
                f"the model {self._name} belongs to the process that loaded it; this process is a fork of it",
                hint="Load the package in the process that calls it.",
            )

    def _closed(self) -> ModelClosedError:
        return ModelClosedError(f"the model {self._name} {self._closed_reason}", hint="Load the package again.")

    def _ask(
        self, message: Question, tensors: list[torch.Tensor], to: torch.device, *, keep: bool = True
    ) -> tuple[Ran, list[torch.Tensor]]:
        """Sends a message with tensors, and returns the answer with copies of its tensors on a device."""
        with contextlib.ExitStack() as undo:
            try:
                calls = (self._idle_connection() if keep else None) or self._connect()
                # If the call fails, a late answer must not reach the next call, so the connection is closed.
                undo.callback(calls.close)
                calls.send(message, tensors)
                answer, received, _ = calls.receive()
                outputs = [tensor.to(to, copy=True) for tensor in received]
            except (ConnectionError, ValueError) as error:
                raise self._worker_exited() from error
            except OSError as error:
                if not self._release.alive:  # close() gave up waiting for this call
                    raise self._worker_exited() from error
                raise ModelRunError(
                    f"the tensors of a call cannot be shared with the worker process: {error}",
                    hint="Sharing needs anonymous memory (memfd) and a few open files. It does not use /dev/shm.",
                ) from error
            if keep:
                undo.pop_all()
                self._idle.append(calls)
        if isinstance(answer, Failed):
            raise answer.exception()
        return answer, outputs

    def _idle_connection(self) -> _Calls | None:
        with self._state:
            return self._idle.pop() if self._idle else None

    def _connect(self) -> _Calls:
        """Opens a connection for one call at a time."""
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
        """Returns an error that says why the worker does not answer."""
        status = self._process.wait(EXIT_GRACE_SECONDS)
        with self._state:
            if self._closed_reason is None:
                self._process.end()
                how = "gave an unreadable answer" if status is None else describe_end(status)
                self._closed_reason = f"lost its worker process, which {how}"
            return ModelRunError(
                f"the model {self._name} {self._closed_reason}",
                hint="Its last output is on stderr. Load the package again.",
            )


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """Makes the main thread's calls. Keeps no reference to a finished call."""
    while (job := jobs.get()) is not None:
        call, answers = job
        try:
            answers.put(call())
        except BaseException as error:  # the caller handles it
            answers.put(error)
        del job, call, answers


def _release(
    process: ChildProcess,
    control: _Control,
    idle: deque[_Calls],
    jobs: SimpleQueue[_Job | None],
    runners: int,
) -> None:
    """Ends the worker. Also runs when an unclosed runner is collected or the interpreter ends."""
    for _ in range(runners):
        jobs.put(None)
    process.end()
    control.close()
    while idle:
        idle.pop().close()


def load_isolated(path: str | os.PathLike[str], *, runners: int, **options: Any) -> IsolatedModel:
    """Loads a package in a worker process: `exportkit.load` with `isolate=True`.

    Raises:
        HostError: The worker process cannot be started. Other errors are the same as for `exportkit.load`.
    """
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
    """Makes the worker load the package that is open here."""
    try:
        control.send(LoadPackage(path=os.path.abspath(reader.path), options=options, settings=TorchSettings.current()))
        answer, _, _ = control.receive()
    except ConnectionError as error:
        status = process.wait(EXIT_GRACE_SECONDS)
        how = "closed the connection" if status is None else describe_end(status)
        raise ModelLoadError(
            f"the worker process {how} while it loaded {reader.path.name}", hint="Its last output is on stderr."
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
