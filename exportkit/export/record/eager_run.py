"""Lets eager answer the calls of a session."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from exportkit.errors import ExportError, UsageError
from exportkit.export.models.call_signature import is_tensor
from exportkit.export.models.placement import on_device
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import DescribedModel, EagerAnswer, EagerSession
from exportkit.export.record.reference import (
    Answered,
    AnsweredCall,
    References,
    SessionState,
    WideAnswers,
    session_references,
    wide_answers,
)
from exportkit.export.record.sequences import DrawnCall
from exportkit.export.record.tolerances import accuracy_outputs
from exportkit.package.case_files import result_keys, results_of, state_keys, state_results
from exportkit.package.manifest import Node, StateTensor
from exportkit.package.structure import flatten
from exportkit.sizes import label_of

MAX_STATE_BYTES = 32_000_000
"""State is recorded up to this size: all of it or none."""


@dataclass(frozen=True)
class EagerRun:
    """Calls that eager has answered in a session of its own, and the state after them, if that is small enough."""

    model: DescribedModel
    calls: Sequence[DrawnCall]
    answered: Sequence[AnsweredCall]
    after: SessionState
    state: tuple[StateTensor, ...]
    structures: tuple[Node, ...]

    @functools.cached_property
    def wide(self) -> WideAnswers | None:
        """What the model answers in a wide dtype. None if no wider one works."""
        with eager_mode():
            return wide_answers(self.answered, self.after)

    @property
    def parts(self) -> tuple[Answered, ...]:
        """What eager answered to each call, then the state after them."""
        return (*self.answered, self.after)

    def keys(self, *, reference: bool = False) -> list[Mapping[str, str]]:
        """Returns for each part the names that its results have in a case's file, by the results' names."""
        calls = [self.model.call_of(call.method) for call in self.calls]
        keys = [result_keys(number, call, reference=reference) for number, call in enumerate(calls)]
        return [*keys, state_keys(self.model.state, reference=reference)]

    def references(self) -> list[References | None]:
        """What eager should have answered in each part, for the results that need a reference."""
        if not any(part.wanted for part in self.parts) or self.wide is None:
            return [None] * len(self.parts)
        return session_references(self.parts, self.wide, tf32=self.model.tf32)


def run_eagerly(model: DescribedModel, calls: Sequence[DrawnCall]) -> EagerRun:
    """Lets eager answer calls in a session of its own.

    Raises:
        ExportError: The model raised.
    """
    calls = [replace(call, bound=on_device(call.bound, model.device)) for call in calls]
    eager, by_name = model.eager, {method.name: method for method in model.methods}
    dimensions = {buffer.dimension for buffer in eager.buffers}
    sizes = {name: size for call in calls for name, size in call.sizes.items() if name in dimensions}
    session = eager.session(sizes)
    answered: list[AnsweredCall] = []
    structures: list[Node] = []
    for drawn in calls:
        call = by_name[drawn.method].call
        answer = call_eager(session, drawn, tf32=model.tf32)
        structures.append(flatten(answer.result, is_tensor, where="the model's output")[0])
        method_spec, listed = eager.specs[drawn.method], results_of(call)
        results = {output.name: tensor for output, tensor in zip(call.outputs, answer.outputs)}
        results |= {f"written.{name}": tensor for name, tensor in answer.written.items()}
        # A result of another structure than the manifest's is a verdict of `verify`, which has no references.
        same = len(answer.outputs) == len(call.outputs)
        wanted = accuracy_outputs(listed, method_spec.tolerances) if same else ()
        model_of, bound = method_spec.model, drawn.bound
        answered.append(AnsweredCall(listed, results, wanted, model=model_of, bound=bound, outputs=answer.outputs))
    used = any(by_name[drawn.method].state for drawn in calls)
    small = sum(tensor.nbytes for tensor in session.state.values()) <= MAX_STATE_BYTES
    recorded = tuple(model.state) if used and small else ()
    listed = state_results(recorded)
    held, wanted = dict(session.state), accuracy_outputs(listed, {})
    after = SessionState(listed, held, wanted, buffers=eager.buffers, sizes=sizes)
    return EagerRun(model, calls, answered, after, recorded, tuple(structures))


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
