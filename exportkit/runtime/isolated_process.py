"""The worker process of a package that was loaded with `isolate=True`, as its callers see it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from exportkit.child.messages import Failed
from exportkit.child.process import ChildProcess, describe_end
from exportkit.errors import ModelClosedError, ModelRunError, UsageError
from exportkit.runtime.isolated_messages import (
    CloseSessions,
    Connect,
    PackageLoaded,
    Question,
    Ran,
    RunRequests,
    Swap,
)
from exportkit.runtime.requests import Answers
from exportkit.runtime.tensor_socket import TensorSocket
from exportkit.runtime.weights import WeightsSource, read_state

T = TypeVar("T")

Requests = Sequence[Sequence[torch.Tensor]]
_Job = tuple[Callable[[], Any], SimpleQueue[Any]]  # the queue gets the result, or the exception
Control = TensorSocket[PackageLoaded | Failed]
_Calls = TensorSocket[Ran | Failed]

EXIT_GRACE_SECONDS = 60.0  # at most, between a worker's sockets closing and its return code


class Worker:
    """A worker process that has loaded a package. Any number of threads may ask it."""

    def __init__(self, name: str, process: ChildProcess, control: Control, device: torch.device, runners: int) -> None:
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
        self.ended_sessions: deque[int] = deque()  # that the worker still has
        self._closed_reason: str | None = None  # why no more can
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        for _ in range(runners):
            threading.Thread(target=_serve, args=(self._jobs,), name="exportkit calls", daemon=True).start()
        self._release = weakref.finalize(self, _release, process, control, self._idle, self._jobs, runners)

    @property
    def alive(self) -> bool:
        """Whether the worker runs and takes calls."""
        return self._closed_reason is None and self._process.wait(0) is None

    def ask(self, message: Question, tensors: list[torch.Tensor]) -> tuple[Ran, list[torch.Tensor]]:
        """Asks the worker, and returns its answer with copies of its tensors on the model's device.

        Raises:
            RuntimeError: The compiled code failed.
            ModelRunError: The worker died, or the shared memory for the tensors cannot be allocated.
            ModelClosedError: The worker had ended before the call.
        """
        return self._run_off_main_thread(partial(self._call, message, tensors))

    def _call(self, message: Question, inputs: list[torch.Tensor]) -> tuple[Ran, list[torch.Tensor]]:
        with self._in_flight(), self._free:
            self._close_sessions()
            return self._ask(message, inputs, self._device)

    def close_sessions(self) -> None:
        """Frees the sessions in `ended_sessions` now; with the next call, if all runners are busy."""
        if not self._process.is_ours:  # a fork has no part in them
            return
        with contextlib.suppress(ModelClosedError, ModelRunError):  # they ended with the worker
            self._run_off_main_thread(self._close_sessions_alone)

    def _close_sessions_alone(self) -> bool:
        if free := self._free.acquire(blocking=False):
            try:
                with self._in_flight():
                    self._close_sessions()
            finally:
                self._free.release()
        return free

    def _close_sessions(self) -> None:
        ended = []
        while self.ended_sessions:
            ended.append(self.ended_sessions.popleft())
        if ended:
            self._ask(CloseSessions(tuple(ended)), [], self._device)

    def run_requests(self, method: str, requests: Requests, outputs: Sequence[int]) -> Answers:
        """Runs requests together. See `Model.run_requests`. Only the worker brings tensors to the device and back."""
        return self._run_off_main_thread(partial(self._call_for, method, requests, outputs))

    def _call_for(self, method: str, requests: Requests, outputs: Sequence[int]) -> Answers:
        came = time.perf_counter()
        with self._in_flight(), self._free:
            started = time.perf_counter()
            tensors = [tensor for request in requests for tensor in request]
            message = RunRequests(method, len(requests), tuple(outputs))
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
            said = f"the model {self._name} belongs to the process that loaded it; this process is a fork of it"
            raise UsageError(said, hint="Load the package in the process that calls it.")

    def _closed(self) -> ModelClosedError:
        return ModelClosedError(f"the model {self._name} {self._closed_reason}", hint="Load the package again.")

    def _ask(
        self, message: Question, tensors: list[torch.Tensor], to: torch.device, *, keep: bool = True
    ) -> tuple[Ran, list[torch.Tensor]]:
        """Sends a message with tensors, and returns the answer with copies of its tensors on a device."""
        with contextlib.ExitStack() as undo:
            try:
                with self._state:
                    calls = self._idle.pop() if keep and self._idle else None
                calls = calls or self._connect()
                # If the call fails, a late answer must not reach the next call, so the connection is closed.
                undo.callback(calls.close)
                calls.send(message, tensors)
                answer, received, _ = calls.receive()
                outputs = [tensor.to(to, copy=True) for tensor in received]
            except ConnectionError as error:
                raise self._worker_exited() from error
            except ValueError as error:  # it may well live on, so there is no end to wait for
                raise self._worker_exited(grace=0.0) from error
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

    def _worker_exited(self, grace: float = EXIT_GRACE_SECONDS) -> ModelRunError:
        """Returns an error that says why the worker does not answer."""
        status = self._process.wait(grace)
        with self._state:
            if self._closed_reason is None:
                self._process.end()
                how = "gave an unreadable answer" if status is None else describe_end(status)
                self._closed_reason = f"lost its worker process, which {how}"
            text = f"the model {self._name} {self._closed_reason}"
            return ModelRunError(text, hint="Its last output is on stderr. Load the package again.")


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
    control: Control,
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
