"""A session: the state of a model that remembers, and the calls that read and write it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NoReturn, Self

import torch

from exportkit.errors import ExportkitError, SessionBrokenError, SessionBusyError, SessionClosedError, UsageError
from exportkit.progress import bytes_text
from exportkit.runtime.methods import MethodPlan, ModelCode
from exportkit.runtime.state import State
from exportkit.runtime.state_file import read_state, write_state
from exportkit.sizes import label_of, shape_at, state_bytes


class Session:
    """State of its own, from the values that were exported. `session.decode(...)` calls a method of the model.

    `session(...)` calls `forward`, or the only method. A session has one caller at a time; another one gets a
    SessionBusyError. Different sessions run beside one another. A call on a GPU runs on the caller's current stream and
    waits for the session's earlier work. Who reads `state` on another stream must wait for that work.

    If a call fails in the compiled code, its state may be half written. The session is then broken: it refuses calls
    until `reset` or `load_state`. Inputs that are refused leave everything as it was.

    Attributes:
        sizes: The number of each dimension that the state has.
        state_bytes: The bytes of the state.
    """

    def __init__(self, code: ModelCode, state: State, sizes: Mapping[str, int]) -> None:
        """Takes over the state. Use `Model.session`."""
        self.sizes = MappingProxyType(dict(sizes))
        self.state_bytes = state_bytes(code.manifest, sizes)
        self._code = code
        self._state = state
        self._fixed = tuple(sizes.items())
        self._turn = threading.Lock()
        self._closed = False
        self._problem: str | None = None  # why it is broken

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, or the only method.

        Returns:
            The method's output, with tensors on the model's device.

        Raises:
            InputError: The package does not allow these inputs. Nothing was run.
            UsageError: The model has several methods, and none is `forward`.
            ModelRunError: The compiled code failed. The session is broken, if the method writes state.
            SessionBusyError: Another call is running.
            SessionBrokenError: An earlier call failed.
            SessionClosedError: The session was closed.
            ModelClosedError: The model was closed.
        """
        return self._call(self._code.plan(), args, kwargs)

    def __getattr__(self, name: str) -> SessionMethod:
        """Returns a method of the model, bound to this session."""
        plans = self.__dict__["_code"].plans if "_code" in self.__dict__ else {}
        if name not in plans:
            methods = ", ".join(plans)
            raise AttributeError(f"a session has no attribute {name!r}; the model's methods are {methods}")
        return SessionMethod(self, plans[name])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._code.plans})

    @property
    def methods(self) -> Mapping[str, SessionMethod]:
        """The model's methods, bound to this session, by name: those whose name is an attribute's as well."""
        return {name: SessionMethod(self, plan) for name, plan in self._code.plans.items()}

    @property
    def broken(self) -> bool:
        """Whether a call failed midway, so that it takes no more calls."""
        return self._problem is not None or not (self._closed or self._state.alive)

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The state by name: the tensors that the code writes. With `isolate=True`, copies.

        Raises:
            SessionClosedError: The session was closed.
        """
        self._check_open()
        return MappingProxyType(self._state.tensors())

    def fork(self) -> Session:
        """Returns another session with a copy of the state.

        Raises:
            SessionBusyError, SessionBrokenError, SessionClosedError, ModelClosedError: As for a call.
        """
        with self._alone():
            self._code.open_runners()
            self._check_whole()
            return Session(self._code, self._state.fork(), self.sizes)

    def reset(self) -> None:
        """Restores the state that a new session begins with. A broken session can then be called again.

        Raises:
            SessionBusyError, SessionClosedError, ModelClosedError: As for a call.
        """
        with self._alone():
            self._code.open_runners()
            with self._replacing("reset"):
                self._state.reset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a safetensors file, which gets its name when it is complete.

        Raises:
            UsageError: The folder does not exist, or it is not writable.
            SessionBusyError, SessionBrokenError, SessionClosedError: As for a call.
            OSError: The disk is full.
        """
        with self._alone():
            self._check_whole()
            write_state(path, self._code.state_identity, self._state.tensors())

    def load_state(
        self, path: str | os.PathLike[str], *, partial: bool = False, row: int | None = None
    ) -> tuple[str, ...]:
        """Replaces the state by one that `save` wrote. A broken session can then be called again.

        Args:
            path: The file.
            partial: Sets only the state that the file names. It may be an adapter of PEFT's beside its
                adapter_config.json, whose names, rank and scale are understood; it takes the place of the one before.
            row: With `partial`, the row of the state that is set. Default: all.

        Returns:
            The names of the state that was set.

        Raises:
            StateError: The file cannot be read, or its state is another model's or of other sizes. Nothing was changed.
            UsageError: There is no such row.
            SessionBusyError, SessionClosedError, ModelClosedError: As for a call. SessionBrokenError, if `partial`.
        """
        if row is not None and not partial:
            raise UsageError("load_state got a row without partial=True", hint="Only a part of the state has one row.")
        with self._alone():
            self._code.open_runners()
            if partial:
                self._check_whole()
            part: Literal["whole", "part", "row"] = "whole" if not partial else "part" if row is None else "row"
            tensors = read_state(path, self._code.reader, self.sizes, part)
            if row is not None:
                rows = min(shape_at(s, self.sizes)[0] for s in self._code.manifest.state if s.name in tensors)
                if not 0 <= row < rows:
                    raise UsageError(f"row must be from 0 to {rows - 1}, got {row}")
            with self._replacing("load_state"):
                self._state.replace(tensors, row)
        return tuple(tensors)

    def close(self) -> None:
        """Frees the state. A call that runs in another thread finishes first."""
        if not self._closed:
            self._closed = True
            self._state.close()

    def _call(self, plan: MethodPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # As `_alone` and `_replacing`, without their objects: a step of a small model takes tens of microseconds.
        self._check_open()
        if not self._turn.acquire(blocking=False):
            self._refuse_busy()
        try:
            self._check_whole()
            runners = self._code.open_runners()
            if not plan.state:
                outputs = self._code.run(plan, runners[plan.name].run, plan.inputs.prepare(args, kwargs))
                return plan.inputs.build_result(outputs)
            inputs = plan.inputs.prepare(args, kwargs, self._fixed)
            self._state.check(plan, inputs)
            if plan.written_state:
                self._problem = plan.interrupted
            try:
                outputs = self._state.run(plan, inputs)
            except ExportkitError as error:
                if plan.written_state:
                    self._problem = f"a call of {plan.name} failed: {error.message}"
                raise
            self._problem = None
            return plan.inputs.build_result(outputs)
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Makes others wait for nothing: they are refused until this block ends."""
        self._check_open()
        if not self._turn.acquire(blocking=False):
            self._refuse_busy()
        try:
            yield
        finally:
            self._turn.release()

    def _refuse_busy(self) -> NoReturn:
        raise SessionBusyError(
            f"the session of {self._code.manifest.name} is running another call",
            hint="A session has one caller at a time. `fork()` or `model.session()` makes one for another caller.",
        )

    @contextlib.contextmanager
    def _replacing(self, what: str) -> Iterator[None]:
        """Counts the session as broken until the block has ended without an error."""
        self._problem = f"{what} was interrupted"
        try:
            yield
        except ExportkitError as error:
            self._problem = f"{what} failed: {error.message}"
            raise
        self._problem = None

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(
                f"the session of {self._code.manifest.name} was closed", hint="`model.session()` makes another."
            )

    def synchronize(self) -> None:
        """Waits for the current stream, as `Model.synchronize`, and looks at this session's calls.

        Raises:
            RefusedValueError: A call met a value that the model refuses. The session is broken, if it writes state.
            SessionBusyError, SessionBrokenError, SessionClosedError: As for a call.
        """
        with self._alone():
            if self._code.device.type == "cuda":
                torch.cuda.current_stream(self._code.device).synchronize()
            self._check_whole()
            for plan in self._code.plans.values():
                if not plan.state and self._code.runners is not None:  # its calls share the stream's memory
                    self._code.look(plan, self._code.runners[plan.name])

    def _check_whole(self) -> None:
        if self._problem is None and (refused := self._state.refused()) is not None:
            plan, error = refused
            if plan.written_state:
                self._problem = f"an earlier call of {plan.name} failed: {error.message}"
            raise error
        if self._problem is not None:
            said = f"the session's state may be half written: {self._problem}"
            raise SessionBrokenError(said, hint="`reset()` or `load_state(path)` makes it whole again.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "closed" if self._closed else "broken" if self.broken else bytes_text(self.state_bytes)
        sizes = f", {label_of(self.sizes)}" if self.sizes else ""
        return f"<exportkit.Session of {self._code.manifest.name}{sizes}, {how}>"


class SessionMethod:
    """A method of the model that is called in a session."""

    def __init__(self, session: Session, plan: MethodPlan) -> None:
        """Binds a method to a session."""
        self.name = plan.name
        self.call = plan.call
        self.__signature__ = plan.inputs.signature
        self._session = session
        self._plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method. Arguments, result and errors are those of `Session.__call__`."""
        return self._session._call(self._plan, args, kwargs)
