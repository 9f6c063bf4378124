"""A copy of a package on one device, which is loaded again when its worker process dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from exportkit.errors import ExportkitError, ModelClosedError, ModelLoadError, ModelRunError
from exportkit.package.structure import flatten
from exportkit.runtime.model import Model
from exportkit.runtime.requests import Answers
from exportkit.serve.engine.checked_request import arguments_of

# Seconds before a worker process is started again, where the one before died without an answer: doubled each time.
FIRST_DELAY, _LONGEST_DELAY = 0.25, 10.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class WorkerLostError(ModelRunError):
    """The worker process died, and the calls that ran in it have no answer."""


class ModelCopy:
    """A loaded package. Any thread may call it.

    Attributes:
        device: The device of the model.
        failure: Why it could not be loaded again; None if it was.
    """

    def __init__(self, load: Callable[[], Model]) -> None:
        """Loads the package. Raises the errors of `exportkit.load`.

        Args:
            load: Loads it, now and after its worker process died.
        """
        self._load = load
        self._model = load()
        self.device = self._model.device
        self._arguments = arguments_of(self._model.manifest.call)
        self._restarting = threading.Lock()
        self._closed = threading.Event()
        self._delay = 0.0
        self._slots = threading.Condition()  # guards the next two
        self._running = 0
        self._exclusive = False
        self.failure: str | None = None

    @property
    def model(self) -> Model:
        """The loaded package. It is another one after the worker process died."""
        return self._model

    @property
    def alive(self) -> bool:
        """Whether it can be called: its worker process, if it has one, runs."""
        return self._model.alive and not self._closed.is_set()

    def call(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the flat outputs for flat inputs.

        Raises:
            InputError: The package does not allow these inputs.
            ModelRunError: The compiled code failed.
            WorkerLostError: The worker process died. `restore` starts another.
        """
        args, kwargs = self._arguments(inputs)
        return tensors_in(self._answered(lambda model: model(*args, **kwargs)))

    def run_requests(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int]) -> Answers:
        """Does what `Model.run_requests` does. Raises the errors of `call`."""
        return self._answered(lambda model: model.run_requests(requests, outputs))

    def _answered(self, ask: Callable[[Model], T]) -> T:
        model = self._model
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
        """Waits until a call may begin.

        Args:
            exclusive: No other call runs at the same time, so that it is known which one killed the worker process.
        """
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

    def check_health(self) -> None:
        """Finds out whether a failure broke the device, and not just one call.

        After some errors of CUDA, such as an illegal address, every later call of the process fails. The model then
        counts as dead.
        """
        if self.device.type != "cuda" or not self._model.cases:
            return
        model = self._model
        try:
            case = model.cases[0]
            model(*case.args, **case.kwargs)
            torch.cuda.synchronize(self.device)
        except (ExportkitError, RuntimeError) as error:
            _log.error("%s: the device is broken: %s", model.manifest.name, error)
            model.close()

    def restore(self) -> bool:
        """Loads the package again if its worker process or its device died.

        There is a delay if it died or could not be loaded several times without an answer between.

        Returns:
            Whether it can be called now. If not, `failure` says why, or it was closed.
        """
        with self._restarting:
            if self.alive or self._closed.is_set():
                return self.alive
            if self._closed.wait(self._delay):
                return False
            self._delay = min(max(2 * self._delay, FIRST_DELAY), _LONGEST_DELAY)
            try:
                self._load_again()
            except (ExportkitError, RuntimeError) as error:  # torch raises RuntimeError for a broken device
                self.failure = f"the model died, and the package cannot be loaded again: {error}"
                _log.error("%s: %s", self._model.manifest.name, self.failure)
            return self.alive

    def _load_again(self) -> None:
        old = self._model
        old.close()
        new = self._load()
        if new.manifest != old.manifest:
            new.close()
            raise ModelLoadError(
                "the file was replaced by another package", hint="Load the model again through the repository."
            )
        self._model, self.failure = new, None
        if self._closed.is_set():  # meanwhile
            new.close()
        _log.warning("%s: the worker process died and was started again", new.manifest.name)

    def close(self) -> None:
        """Frees the model after its running calls."""
        self._closed.set()
        self._model.close()


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns the flat tensors of arguments or of a result."""
    return flatten(value, lambda part: isinstance(part, torch.Tensor))[1]
