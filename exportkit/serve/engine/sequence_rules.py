"""What is said of sequences that are not there, or end, and how large the state of a new one is."""

from __future__ import annotations

from collections.abc import Mapping

from exportkit.package.manifest import Manifest
from exportkit.runtime.state import state_dimensions
from exportkit.serve.engine.steps import AGAIN, HeldSession
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.sequences.table import Reason
from exportkit.serve.statuses import BadRequestError, DeadlineError, SequenceError, ServeError

SequenceKey = tuple[str, int | str]
"""Whose a sequence is, and its id."""

_WHY: dict[Reason, str] = {
    "end": "its last step was answered",
    "restarted": "another one was begun in its place",
    "idle": "no step came for too long",
    "failed": "the model failed on one of its steps",
    "unanswered": "one of its steps was given up, and may have changed the state",
    "lost": "the process with its state died",
    "unloaded": "its version of the model was unloaded, or the server ends",
}


def ended(reason: Reason) -> SequenceError:
    """Returns the answer to a step that waited when its sequence ended."""
    return SequenceError(f"the sequence ended: {_WHY[reason]}", hint=AGAIN)


def key_of(step: SequenceStep) -> SequenceKey:
    """Returns the key of a step's sequence."""
    return step.owner, step.id


def gone(name: str, step: SequenceStep, reason: Reason | None) -> SequenceError:
    """Returns the answer to a step of a sequence that is not there."""
    if reason is None:
        return SequenceError(
            f"{name} has no sequence {step.id!r}",
            hint="It never began, ended long ago, or another replica has or had it. "
            "Begin it again under another id, with `sequence_start`.",
        )
    return SequenceError(f"the sequence {step.id!r} of {name} ended: {_WHY[reason]}", hint=AGAIN)


def reason_of(error: ServeError, held: HeldSession) -> Reason:
    """Returns why a sequence ends whose step got this error."""
    if held.lost:
        return "lost"
    return "unanswered" if isinstance(error, DeadlineError) else "failed"


def state_sizes(manifest: Manifest, given: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of a new session. Raises BadRequestError if the first request does not say them all."""
    wanted = state_dimensions(manifest)
    if missing := [name for name in wanted if name not in given]:
        raise BadRequestError(
            f"the state has the size {missing[0]}, which the inputs of this method do not have",
            hint="Begin the sequence with another method.",
        )
    return {name: given[name] for name in wanted}
