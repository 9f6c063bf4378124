"""Tells whether every right kernel gives the same answer to a call as eager, within what the verdicts allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from safetensors.torch import load

from exportkit.accuracy import allowed_error, eager_error, whole_rows
from exportkit.export.record.eager_run import EagerRun
from exportkit.export.record.edge_values import GREAT
from exportkit.export.record.record import RecordedCase
from exportkit.export.record.ulp_perturbation import perturbed_answers
from exportkit.package.case_files import result_keys, results_in, state_keys, worst
from exportkit.package.manifest import Accuracy, PackagedMethod, StateTensor, TensorOutput

_RUNS = 2  # how often eager is rounded otherwise
_MARGIN = 0.75  # of what is allowed, because other rounding may be worse than what was tried

ROUNDING = "in which rounding decides"
FAR = "in which eager is far from its reference"

_Results = Mapping[str, torch.Tensor]


class NumericalStability:
    """The check of one model.

    Attributes:
        unstable: The result that rounding decided in the last case of which `problem` said so.
    """

    def __init__(
        self, methods: Sequence[PackagedMethod], state: Sequence[StateTensor], drawn: Sequence[RecordedCase]
    ) -> None:
        """Learns eager's errors from the drawn cases.

        Args:
            methods: The description of the model's methods.
            state: The description of its state.
            drawn: The drawn cases.
        """
        self.unstable = ""
        self._state = state
        self._calls = {method.name: method.call for method in methods}
        self._errors: dict[tuple[str | None, str], Accuracy] = {}
        for case in drawn:
            for place, name, error in _errors(case):
                self._errors[place, name] = worst([error, *filter(None, [self._errors.get((place, name))])])

    def problem(self, eager_run: EagerRun, case: RecordedCase) -> str | None:
        """Returns why a case cannot be held against a package; None if it can.

        Args:
            eager_run: What eager answered.
            case: The same as a case.
        """
        own = {(place, name): error for place, name, error in _errors(case)}
        methods = {call.method for call in case.calls}
        known = {key for key in self._errors if key[0] in methods or (key[0] is None and case.state_accuracy)}
        if not known <= own.keys() or not all(self._usual(key, error) for key, error in own.items()):
            return FAR
        tensors = load(case.tensors)
        others = self._others(eager_run, great=any(kind in case.edge_case for kind in GREAT))
        return None if all(self._agrees(other, eager_run, tensors) for other in others) else ROUNDING

    def _usual(self, key: tuple[str | None, str], error: Accuracy) -> bool:
        """Whether eager's error is what the drawn cases show: a case must not widen what is allowed in the others."""
        drawn = self._errors.get(key, Accuracy(rms=0.0, greatest=0.0))
        exact = allowed_error(Accuracy(rms=0.0, greatest=0.0), "float32")
        return error.rms <= max(2 * drawn.rms, exact.rms / 4) and error.greatest <= max(
            2 * drawn.greatest, exact.greatest / 4
        )

    def _others(self, eager_run: EagerRun, *, great: bool) -> Iterator[Sequence[_Results] | None]:
        """Yields what right code may answer: the results of each call, then the state. None if that is not defined."""
        if eager_run.wide is not None:
            yield eager_run.wide.narrowed(eager_run.answered, eager_run.after)
        for seed in range(_RUNS):
            run = perturbed_answers(eager_run, seed)
            yield None if run is None or run.undefined or (great and run.blends) else [*run.calls, run.state]

    def _agrees(self, other: Sequence[_Results] | None, eager_run: EagerRun, tensors: _Results) -> bool:
        if other is None:
            return False
        *calls, state = other
        for number, (answered, results) in enumerate(zip(eager_run.answered, calls)):
            method = eager_run.calls[number].method
            references = results_in(result_keys(number, self._calls[method], reference=True), tensors)
            if not self._same(method, answered.results, answered.eager, results, references):
                return False
        references = results_in(state_keys(self._state, reference=True), tensors)
        return self._same(None, eager_run.after.results, eager_run.after.eager, state, references)

    def _same(
        self,
        place: str | None,
        outputs: Sequence[TensorOutput],
        eager: _Results,
        results: _Results,
        references: _Results,
    ) -> bool:
        ours = {name: tensor.detach().cpu() for name, tensor in eager.items()}
        theirs = {name: tensor.detach().cpu() for name, tensor in results.items()}
        for output in outputs:
            name = output.name
            self.unstable = name
            if name not in theirs or name not in ours or theirs[name].shape != ours[name].shape:
                return False
            if output.tolerance.ranking_of is not None:
                continue  # the verdict allows places to change where values are near
            if name in references and ours[name].is_floating_point():
                error = eager_error(output, theirs, references)
                limit = allowed_error(self._errors.get((place, name), Accuracy(rms=0.0, greatest=0.0)), output.dtype)
                if error.rms > _MARGIN * limit.rms or error.greatest > _MARGIN * limit.greatest:
                    return False
            elif not _near(output, ours, theirs):
                return False
        return True


def _errors(case: RecordedCase) -> Iterator[tuple[str | None, str, Accuracy]]:
    """Yields eager's errors in a case: the method, or None for the state; the result; the error."""
    for call in case.calls:
        yield from ((call.method, name, error) for name, error in call.accuracy.items() if error is not None)
    yield from ((None, name, error) for name, error in case.state_accuracy.items() if error is not None)


def _near(output: TensorOutput, eager: _Results, other: _Results) -> bool:
    """Whether a result without a reference is within its tolerance of eager's."""
    wanted, given = eager[output.name], other[output.name]
    if not wanted.numel():
        return True
    same = wanted == given if not _has_nan(wanted) else (wanted == given) | (wanted.isnan() & given.isnan())
    if output.tolerance.rows_of is not None:
        rows = eager[output.tolerance.rows_of] == other[output.tolerance.rows_of]
        same |= ~whole_rows(rows, wanted)
    if bool(same.all()):
        return True
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    distance = (given.to(wide) - wanted.to(wide)).abs()
    allowed = _MARGIN * (output.tolerance.atol + output.tolerance.rtol * wanted.to(wide).abs())
    return bool((same | (distance.isfinite() & (distance <= allowed))).all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
