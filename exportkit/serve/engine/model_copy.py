"""A copy of a package on one device, which is loaded again when its worker process dies."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from exportkit.errors import ExportkitError, ModelClosedError, ModelLoadError, ModelRunError
from exportkit.package.structure import flatten
from exportkit.runtime.model import Model
from exportkit.serve.engine.checked_request import arguments_of

_FIRST_DELAY, _LONGEST_DELAY = 0.25, 30.0  # seconds before a worker is started again, doubled each time
_STABLE_SECONDS = 60.0  # a worker that lived for longer is started again without delay

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
        self._loaded = time.monotonic()
        self._delay = 0.0
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
        model = self._model
        args, kwargs = self._arguments(inputs)
        try:
            return tensors_in(model(*args, **kwargs))
        except (ModelRunError, ModelClosedError) as error:
            if model.alive:
                raise
            raise WorkerLostError(error.message) from error

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
        """Loads the package again if its worker process or its device died, after a delay if that happens often.

        Returns:
            Whether it can be called now. If not, `failure` says why, or it was closed.
        """
        with self._restarting:
            if self.alive or self._closed.is_set():
                return self.alive
            lived = time.monotonic() - self._loaded
            self._delay = 0.0 if lived > _STABLE_SECONDS else min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            if self._closed.wait(self._delay):
                return False
            try:
                self._load_again()
            except (ExportkitError, RuntimeError) as error:  # torch raises RuntimeError for a broken device
                self.failure = f"the model died, and the package cannot be loaded again: {error}"
                _log.error("%s: %s", self._model.manifest.name, self.failure)
            self._loaded = time.monotonic()
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
