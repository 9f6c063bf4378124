"""Tells whether every right kernel gives the same answer to a call as eager, within what the verdicts allow.

A drawn case keeps how far eager moves where it does not: the verdict on such a result is that it cannot be judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load

from exportkit.accuracy import allowed_error, differences, distance, eager_error, whole_rows
from exportkit.export.record.eager_run import EagerRun
from exportkit.export.record.edge_values import GREAT
from exportkit.export.record.outlier_errors import is_outlier
from exportkit.export.record.reference import Answered, References
from exportkit.export.record.rounding import perturbed_answers
from exportkit.package.case_files import results_in, worst
from exportkit.package.manifest import Accuracy, TensorOutput

if TYPE_CHECKING:
    from exportkit.export.record.record import RecordedCase

_RUNS = 2  # how often eager is rounded otherwise
_MARGIN = 0.75  # of what is allowed, because other rounding may be worse than what was tried

ROUNDING = "numerically unstable"
FAR = "in which eager itself is inexact"

_Results = Mapping[str, torch.Tensor]
_NONE = Accuracy(rms=0.0, greatest=0.0)


class NumericalStability:
    """The check of one model. `unstable` is the result that rounding decided in the last case of which it said so."""

    def __init__(self, drawn: Sequence[RecordedCase]) -> None:
        """Learns eager's errors from the drawn cases."""
        self.unstable = ""
        self._errors: dict[tuple[str | None, str], Accuracy] = {}
        for case in drawn:
            for place, name, error in _errors(case):
                self._errors[place, name] = worst([error, *filter(None, [self._errors.get((place, name))])])

    def problem(self, eager_run: EagerRun, case: RecordedCase) -> str | None:
        """Returns why a case, which is what eager answered, cannot be held against a package; None if it can."""
        own = {(place, name): error for place, name, error in _errors(case)}
        methods = {call.method for call in case.calls}
        known = {key for key in self._errors if key[0] in methods or (key[0] is None and case.state_accuracy)}
        if not known <= own.keys() or not all(self._usual(key, error) for key, error in own.items()):
            return FAR
        tensors = load(case.tensors)
        others = _others(eager_run, great=any(kind in case.edge_case for kind in GREAT))
        return None if all(self._agrees(other, eager_run, tensors) for other in others) else ROUNDING

    def _usual(self, key: tuple[str | None, str], error: Accuracy) -> bool:
        """Whether eager's error is what the drawn cases show: a case must not widen what is allowed in the others."""
        drawn = self._errors.get(key, _NONE)
        exact = allowed_error(_NONE, "float32")
        return error.rms <= max(2 * drawn.rms, exact.rms / 4) and error.greatest <= max(
            2 * drawn.greatest, exact.greatest / 4
        )

    def _agrees(self, other: Sequence[_Results] | None, eager_run: EagerRun, tensors: _Results) -> bool:
        if other is None:
            return False
        places = [*(call.method for call in eager_run.calls), None]
        for place, answered, results, keys in zip(places, eager_run.parts, other, eager_run.keys(reference=True)):
            references = results_in(keys, tensors)
            for output in answered.results:
                self.unstable = output.name
                error = self._errors.get((place, output.name), _NONE)
                if output.name not in results or not _same(output, answered.eager, results, references, error):
                    return False
        return True


def eager_moves(eager_run: EagerRun, known: Sequence[References | None]) -> dict[str, Accuracy]:
    """Returns how far eager moves when it rounds otherwise, by the name of a result's tensor in a case's file.

    A result is left out if it moves by no more than the verdicts allow, or if the spec gives numbers for it.
    """
    wide = eager_run.wide
    far = wide.far() if wide else 0.0
    parts = [_Part(*each, far) for each in zip(eager_run.keys(), eager_run.parts, known)]
    moves: dict[str, Accuracy] = {}
    may_move = wide is None or wide.decides or any(part.lacks_references for part in parts)
    for other in _others(eager_run) if may_move else ():
        for part, results in zip(parts, other or ()):
            for key, moved in part.moves(results):
                moves[key] = worst([moved, moves.get(key, moved)])
    return moves


@dataclass(frozen=True)
class _Part:
    """The results of one call, or the state after all."""

    keys: Mapping[str, str]
    answered: Answered
    references: References | None
    far: float

    @property
    def lacks_references(self) -> bool:
        """Whether a result that needs a reference is too far from it to have one."""
        return any(self.references is None or name not in self.references.outputs for name in self.answered.wanted)

    def moves(self, results: _Results) -> Iterator[tuple[str, Accuracy]]:
        """Yields how far results are from eager's in another run, where the verdicts do not allow that."""
        for output in (output for output in self.answered.results if output.name in results):
            eager, other = self.answered.eager[output.name].detach().cpu(), results[output.name].detach().cpu()
            if eager.shape == other.shape and self._moves(output, eager, results):
                yield self.keys[output.name], distance(eager, other)

    def _moves(self, output: TensorOutput, eager: torch.Tensor, results: _Results) -> bool:
        """Whether another run decided otherwise, and did not only round otherwise, which eager's error allows for."""
        known, tolerance = self.references, output.tolerance
        if not eager.is_floating_point():
            exact = tolerance.rtol == tolerance.atol == 0
            return exact and not _same(output, self.answered.eager, results, {}, _NONE)
        error = known.accuracy.get(output.name) if known else None
        wanted = output.name in self.answered.wanted
        if not wanted or known is None or error is None:
            return wanted and not _same(output, self.answered.eager, results, {}, _NONE)
        theirs = {name: tensor.detach().cpu() for name, tensor in results.items()}
        other = eager_error(output, theirs, known.outputs)
        decided = other.rms > self.far or is_outlier(worst([error, other]), output.dtype, eager.numel())
        return decided and not _same(output, self.answered.eager, results, known.outputs, error)


def _others(eager_run: EagerRun, *, great: bool = False) -> Iterator[Sequence[_Results] | None]:
    """Yields what right code may answer: the results of each call, then the state. None if that is not defined."""
    if eager_run.wide is not None:
        yield eager_run.wide.narrowed(eager_run.parts)
    for seed in range(_RUNS):
        yield perturbed_answers(eager_run, seed, great=great)


def _same(output: TensorOutput, eager: _Results, other: _Results, references: _Results, error: Accuracy) -> bool:
    """Whether a result of another run is one that the verdicts allow where eager has this error, with a margin."""
    names = [name for name in (output.name, output.tolerance.rows_of) if name]
    ours, theirs = ({name: each[name].detach().cpu() for name in names} for each in (eager, other))
    if theirs[output.name].shape != ours[output.name].shape:
        return False
    if output.tolerance.ranking_of is not None:
        return True  # the verdict allows places to change where values are near
    if output.name in references and ours[output.name].is_floating_point():
        limit, error = allowed_error(error, output.dtype), eager_error(output, theirs, references)
        return error.rms <= _MARGIN * limit.rms and error.greatest <= _MARGIN * limit.greatest
    return _near(output, ours, theirs)


def _errors(case: RecordedCase) -> Iterator[tuple[str | None, str, Accuracy]]:
    """Yields eager's errors in a case: the method, or None for the state; the result; the error."""
    for call in case.calls:
        yield from ((call.method, name, error) for name, error in call.accuracy.items() if error is not None)
    yield from ((None, name, error) for name, error in case.state_accuracy.items() if error is not None)


def _near(output: TensorOutput, eager: _Results, other: _Results) -> bool:
    """Whether a result without a reference is within its tolerance of eager's."""
    wanted, given = eager[output.name], other[output.name]
    difference, magnitude = differences(wanted, given)
    right = difference.isfinite() & (
        difference <= _MARGIN * (output.tolerance.atol + output.tolerance.rtol * magnitude)
    )
    if output.tolerance.rows_of is not None:
        rows = eager[output.tolerance.rows_of] == other[output.tolerance.rows_of]
        right |= ~whole_rows(rows, wanted)
    return bool(right.all())
