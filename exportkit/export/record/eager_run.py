"""Lets eager answer the calls of a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from exportkit.errors import ExportError, UsageError
from exportkit.export.models.call_signature import is_tensor
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import EagerAnswer, EagerMethods, EagerSession
from exportkit.export.record.reference import (
    AnsweredCall,
    SessionReferences,
    SessionState,
    WideAnswers,
    session_references,
    wide_answers,
)
from exportkit.export.record.sequences import DrawnCall
from exportkit.export.record.tolerances import accuracy_outputs
from exportkit.package.case_files import results_of, state_results
from exportkit.package.manifest import Node, PackagedMethod, StateTensor
from exportkit.package.structure import flatten
from exportkit.sizes import label_of

MAX_STATE_BYTES = 32_000_000
"""State is recorded up to this size: all of it or none."""


@dataclass(frozen=True)
class EagerRun:
    """Calls that eager has answered in a session of its own.

    Attributes:
        calls: The calls, on the model's device.
        answered: The same with eager's results.
        after: The state after them, if it is small enough to be recorded.
        state: The description of that state.
        structures: The structure of each result.
        again: Lets eager answer the same calls in a new session.
    """

    calls: Sequence[DrawnCall]
    answered: Sequence[AnsweredCall]
    after: SessionState
    state: tuple[StateTensor, ...]
    structures: tuple[Node, ...]
    again: Callable[[], EagerRun]

    @functools.cached_property
    def wide(self) -> WideAnswers | None:
        """What the model answers in a wide dtype. None if no wider one works."""
        with eager_mode():
            return wide_answers(self.answered, self.after)

    def references(self, *, tf32: bool) -> SessionReferences | None:
        """What eager should have answered, for the results that need a reference. `tf32`: eager may have used it."""
        if not (self.after.wanted or any(call.wanted for call in self.answered)) or self.wide is None:
            return None
        return session_references(self.answered, self.after, self.wide, tf32=tf32)


def run_eagerly(
    eager: EagerMethods,
    methods: Sequence[PackagedMethod],
    state: Sequence[StateTensor],
    calls: Sequence[DrawnCall],
    *,
    tf32: bool,
) -> EagerRun:
    """Lets eager answer calls in a session of its own.

    Args:
        eager: The model.
        methods: The description of its methods.
        state: The description of its state.
        calls: The calls, on the model's device.
        tf32: Whether the model may use TF32.

    Raises:
        ExportError: The model raised.
    """
    by_name = {method.name: method for method in methods}
    sizes = _state_sizes(eager, calls)
    session = eager.session(sizes)
    answered: list[AnsweredCall] = []
    structures: list[Node] = []
    for drawn in calls:
        call = by_name[drawn.method].call
        answer = call_eager(session, drawn, tf32=tf32)
        structures.append(flatten(answer.result, is_tensor, where="the model's output")[0])
        written = {f"written.{name}": tensor for name, tensor in answer.written.items()}
        method_spec, listed = eager.specs[drawn.method], results_of(call)
        results = {output.name: tensor for output, tensor in zip(call.outputs, answer.outputs)} | written
        # A result of another structure than the manifest's is a verdict of `verify`, which has no references.
        same = len(answer.outputs) == len(call.outputs)
        wanted = accuracy_outputs(listed, method_spec.tolerances) if same else ()
        answered.append(AnsweredCall(method_spec.model, drawn.bound, listed, results, wanted, answer.outputs))
    used = any(by_name[drawn.method].state for drawn in calls)
    small = sum(tensor.nbytes for tensor in session.state.values()) <= MAX_STATE_BYTES
    recorded = tuple(state) if used and small else ()
    listed = state_results(recorded)
    after = SessionState(eager.buffers, sizes, listed, dict(session.state), accuracy_outputs(listed, {}))
    again = functools.partial(run_eagerly, eager, methods, state, calls, tf32=tf32)
    return EagerRun(calls, answered, after, recorded, tuple(structures), again)


def call_eager(session: EagerSession, call: DrawnCall, *, tf32: bool) -> EagerAnswer:
    """Makes one call of eager. Without TF32, the results have the precision of their dtype.

    Raises:
        ExportError: The model raised. The message says what it was given.
    """
    try:
        with eager_mode(tf32=tf32):
            return session.call(call.method, call.bound)
    except UsageError:
        raise
    except Exception as error:
        # The model may raise anything. Its own traceback is chained.
        raise ExportError(
            f"the eager model refused a case of {label_of(call.sizes)}: {type(error).__name__}: {error}",
            hint="Narrow the range of that dimension, or give the spec a draw_inputs that makes legal inputs.",
        ) from error


def _state_sizes(eager: EagerMethods, calls: Iterable[DrawnCall]) -> dict[str, int]:
    dimensions = {buffer.dimension for buffer in eager.buffers}
    return {name: size for call in calls for name, size in call.sizes.items() if name in dimensions}
