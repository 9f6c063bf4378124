"""A loaded package on one device, which is loaded again when its worker process dies; its methods share it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from exportkit.errors import ExportkitError, ModelClosedError, ModelLoadError, ModelRunError
from exportkit.package.manifest import Call
from exportkit.package.structure import builder, flatten
from exportkit.runtime.isolated import IsolatedModel
from exportkit.runtime.loaded_cases import LoadedCall
from exportkit.runtime.model import Model
from exportkit.runtime.requests import TriedRows

# Seconds before a worker process is started again, where the one before died without an answer: doubled each time.
FIRST_DELAY, _LONGEST_DELAY = 0.25, 10.0

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

T = TypeVar("T")

_log = logging.getLogger(__name__)


class WorkerLostError(ModelRunError):
    """The worker process died, and the calls that ran in it have no answer."""


class ModelReplica:
    """A loaded package on one device. Any thread may call it.

    Attributes:
        model: The loaded package. It is another one after the worker process died.
        device: The device of the model.
        failure: Why it could not be loaded again; None if it was.
        lost: Why this process can never call it again; None if it can, or a worker process may.
    """

    def __init__(self, load: Callable[[], Model]) -> None:
        """Loads the package, now and after its worker process died. Raises the errors of `exportkit.load`."""
        self._load = load
        self.model = load()
        self.device = self.model.device
        self._restarting = threading.Lock()
        self._closed = threading.Event()
        self._delay = 0.0
        self._slots = threading.Condition()  # guards the next two
        self._running = 0
        self._exclusive = False
        self.failure: str | None = None
        self.lost: str | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be called: its worker process, if it has one, runs."""
        return self.model.alive and not self._closed.is_set()

    def recorded(self, method: str) -> Iterator[LoadedCall]:
        """Yields the recorded calls of a method. Those with edge values are for `verify`."""
        for place, case in enumerate(self.model.manifest.cases):
            if any(call.method == method for call in case.calls):
                recorded = self.model.cases[place]
                yield from (call for call in recorded.calls if call.method == method and not recorded.edge_case)

    def try_rows(self, method: str, most: int) -> TriedRows:
        """See `Model.try_rows`. Raises WorkerLostError if the worker process died."""
        return self.answered(lambda model: model.try_rows(method, most))

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
        """Waits until a call may begin.

        Args:
            exclusive: No other call runs at the same time, of no method, so that it is known which one killed the
                worker process.
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

    def check_health(self, method: str) -> None:
        """Finds out whether a failure of a method broke the device, and not just one call.

        After some errors of CUDA, such as an illegal address, every later call of the process fails. The model then
        counts as dead, and without a worker process as lost.
        """
        model = self.model
        if self.device.type != "cuda":
            return
        try:
            if not model.manifest.method(method).state:
                if (call := next(self.recorded(method), None)) is None:
                    return
                model.methods[method](*call.args, **call.kwargs)
            torch.cuda.synchronize(self.device)
        except ModelClosedError:  # another runner found out
            return
        except (ExportkitError, RuntimeError) as error:
            _log.error("%s: the device is broken: %s", model.manifest.name, error)
            self.lose(str(error).partition("\n")[0])

    def lose(self, reason: str) -> None:
        """Closes the model, whose device is broken for its process. A worker process is replaced; this one is not."""
        if not isinstance(self.model, IsolatedModel):
            self.lost = self.failure = f"{self.device} is lost to this process: {reason}"
        self.model.close()

    def restore(self) -> bool:
        """Loads the package again if its worker process or its device died.

        There is a delay if it died or could not be loaded several times without an answer between.

        Returns:
            Whether it can be called now. If not, `failure` says why, or it was closed.
        """
        with self._restarting:
            if self.alive or self._closed.is_set() or self.lost is not None:
                return self.alive
            if self._closed.wait(self._delay):
                return False
            self._delay = min(max(2 * self._delay, FIRST_DELAY), _LONGEST_DELAY)
            try:
                self._load_again()
            except (ExportkitError, RuntimeError) as error:  # torch raises RuntimeError for a broken device
                self.failure = f"the model died, and the package cannot be loaded again: {error}"
                _log.error("%s: %s", self.model.manifest.name, self.failure)
            return self.alive

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
        if self._closed.is_set():  # meanwhile
            new.close()
        _log.warning("%s: the worker process died and was started again", new.manifest.name)

    def close(self) -> None:
        """Frees the model when its running calls have ended."""
        self._closed.set()
        self.model.close()


def arguments_of(call: Call) -> Callable[[Sequence[torch.Tensor]], Arguments]:
    """Returns a function that builds a call's arguments from its flat inputs. What was fixed at export is filled in."""
    positional = [builder(parameter.value) for parameter in call.parameters if parameter.kind == "positional"]
    named = [(parameter.name, builder(parameter.value)) for parameter in call.parameters if parameter.kind == "keyword"]

    def build(inputs: Sequence[torch.Tensor]) -> Arguments:
        return tuple([part(inputs) for part in positional]), {name: part(inputs) for name, part in named}

    return build


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns the flat tensors of arguments or of a result."""
    return flatten(value, lambda part: isinstance(part, torch.Tensor))[1]
