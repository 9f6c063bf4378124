"""A copy of a package on one device, which is loaded again when its worker process dies; its methods share it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from exportkit.errors import ExportkitError, ModelClosedError, ModelLoadError, ModelRunError
from exportkit.package.structure import flatten
from exportkit.runtime.isolated import IsolatedModel
from exportkit.runtime.loaded_cases import LoadedCall
from exportkit.runtime.model import Model
from exportkit.runtime.requests import Answers
from exportkit.serve.engine.checked_request import arguments_of

# Seconds before a worker process is started again, where the one before died without an answer: doubled each time.
FIRST_DELAY, _LONGEST_DELAY = 0.25, 10.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class WorkerLostError(ModelRunError):
    """The worker process died, and the calls that ran in it have no answer."""


class SharedModel:
    """A loaded package, which the copies of its methods call.

    Attributes:
        device: The device of the model.
        failure: Why it could not be loaded again; None if it was.
        lost: Why this process can never call it again; None if it can, or a worker process may.
    """

    def __init__(self, load: Callable[[], Model], name: str | None = None) -> None:
        """Loads the package. Raises the errors of `exportkit.load`.

        Args:
            load: Loads it, now and after its worker process died.
            name: The name by which it is served, for the log. Default: the package's.
        """
        self._load = load
        self.model = load()
        self._name = name or self.model.manifest.name
        self.device = self.model.device
        self._restarting = threading.Lock()
        self.closed = threading.Event()
        self._delay = 0.0
        self._slots = threading.Condition()  # guards the next three
        self._running = 0
        self._exclusive = False
        self._users = 0
        self.failure: str | None = None
        self.lost: str | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be called: its worker process, if it has one, runs."""
        return self.model.alive and not self.closed.is_set()

    def use(self) -> None:
        """Counts one more copy that calls it."""
        with self._slots:
            self._users += 1

    def answered(self, ask: Callable[[Model], T]) -> T:
        """Asks the model. Raises WorkerLostError if its worker process died."""
        model = self.model
        try:
            answer = ask(model)
        except (ModelRunError, ModelClosedError) as error:
            if model.alive:
                raise
            raise WorkerLostError(error.message) from error
        self._delay = 0.0
        return answer

    @contextmanager
    def slot(self, *, exclusive: bool = False) -> Iterator[None]:
        """Waits until a call may begin: see ModelCopy.slot."""
        with self._slots:
            self._slots.wait_for(lambda: not self._exclusive)
            self._exclusive = exclusive
            if exclusive:
                self._slots.wait_for(lambda: not self._running)
            self._running += 1
        try:
            yield
        finally:
            with self._slots:
                self._running -= 1
                self._exclusive = self._exclusive and not exclusive
                self._slots.notify_all()

    def restore(self) -> bool:
        """Loads the package again if its worker process or its device died: see ModelCopy.restore."""
        with self._restarting:
            if self.alive or self.closed.is_set() or self.lost is not None:
                return self.alive
            if self.closed.wait(self._delay):
                return False
            self._delay = min(max(2 * self._delay, FIRST_DELAY), _LONGEST_DELAY)
            try:
                self._load_again()
            except (ExportkitError, RuntimeError) as error:  # torch raises RuntimeError for a broken device
                self.failure = f"the model died, and the package cannot be loaded again: {error}"
                _log.error("%s: %s", self._name, self.failure)
            return self.alive

    def lose(self, reason: str) -> None:
        """Closes the model, whose device is broken for its process. A worker process is replaced; this one is not."""
        if not isinstance(self.model, IsolatedModel):
            self.lost = self.failure = f"{self.device} is lost to this process: {reason}"
        self.model.close()

    def _load_again(self) -> None:
        old = self.model
        old.close()
        new = self._load()
        if new.manifest != old.manifest:
            new.close()
            raise ModelLoadError(
                "the file was replaced by another package", hint="Load the model again through the repository."
            )
        self.model, self.failure = new, None
        if self.closed.is_set():  # meanwhile
            new.close()
        _log.warning("%s: the worker process died and was started again", self._name)

    def leave(self) -> None:
        """Counts one copy less. After the last one, the model is freed when its running calls have ended."""
        with self._slots:
            self._users -= 1
            if self._users > 0:
                return
        self.closed.set()
        self.model.close()


class ModelCopy:
    """A method of a loaded package. Any thread may call it.

    Attributes:
        method: The method.
    """

    def __init__(self, load: Callable[[], Model] | SharedModel, method: str | None = None) -> None:
        """Loads the package, unless it is loaded. Raises the errors of `exportkit.load`.

        Args:
            load: Loads it, now and after its worker process died; or a loaded package.
            method: The method's name; None for the default one.
        """
        self.shared = load if isinstance(load, SharedModel) else SharedModel(load)
        self.shared.use()
        self.method = self.model.manifest.method(method)
        self._arguments = arguments_of(self.method.call)
        self._left = False

    @property
    def model(self) -> Model:
        """The loaded package. It is another one after the worker process died."""
        return self.shared.model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.shared.device

    @property
    def failure(self) -> str | None:
        """Why it could not be loaded again; None if it was."""
        return self.shared.failure

    @property
    def lost(self) -> str | None:
        """Why this process can never call it again; None if it can, or a worker process may."""
        return self.shared.lost

    @property
    def alive(self) -> bool:
        """Whether it can be called: its worker process, if it has one, runs."""
        return self.shared.alive and not self._left

    def recorded(self) -> Iterator[LoadedCall]:
        """Yields the recorded calls of the method. Those with troublesome values are for `verify`."""
        for place, case in enumerate(self.model.manifest.cases):
            if any(call.method == self.method.name for call in case.calls):
                recorded = self.model.cases[place]
                yield from (c for c in recorded.calls if c.method == self.method.name and not recorded.trouble)

    def call(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the flat outputs for flat inputs.

        Raises:
            InputError: The package does not allow these inputs.
            ModelRunError: The compiled code failed.
            WorkerLostError: The worker process died. `restore` starts another.
        """
        args, kwargs = self._arguments(inputs)
        name = self.method.name
        return tensors_in(self.shared.answered(lambda model: model.methods[name](*args, **kwargs)))

    def run_requests(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int]) -> Answers:
        """Does what `Model.run_requests` does. Raises the errors of `call`."""
        return self.shared.answered(lambda model: model.run_requests(requests, outputs, self.method.name))

    def slot(self, *, exclusive: bool = False) -> AbstractContextManager[None]:
        """Waits until a call may begin.

        Args:
            exclusive: No other call runs at the same time, of no method, so that it is known which one killed the
                worker process.
        """
        return self.shared.slot(exclusive=exclusive)

    def check_health(self) -> None:
        """Finds out whether a failure broke the device, and not just one call.

        After some errors of CUDA, such as an illegal address, every later call of the process fails. The model then
        counts as dead, and without a worker process as lost.
        """
        model = self.model
        if self.device.type != "cuda":
            return
        try:
            call = None if self.method.state else next(self.recorded(), None)
            if call is None and not self.method.state:
                return
            if call is not None:
                model.methods[self.method.name](*call.args, **call.kwargs)
            torch.cuda.synchronize(self.device)
        except ModelClosedError:  # another runner found out
            return
        except (ExportkitError, RuntimeError) as error:
            _log.error("%s: the device is broken: %s", model.manifest.name, error)
            self.shared.lose(str(error).partition("\n")[0])

    def restore(self) -> bool:
        """Loads the package again if its worker process or its device died.

        There is a delay if it died or could not be loaded several times without an answer between.

        Returns:
            Whether it can be called now. If not, `failure` says why, or it was closed.
        """
        return not self._left and self.shared.restore()

    def close(self) -> None:
        """Frees the model after its running calls, unless copies of other methods use it."""
        if not self._left:
            self._left = True
            self.shared.leave()


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns the flat tensors of arguments or of a result."""
    return flatten(value, lambda part: isinstance(part, torch.Tensor))[1]
