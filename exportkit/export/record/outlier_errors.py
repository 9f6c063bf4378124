"""The greatest error that right code makes, where a few elements have nearly all of it (docs/adr/0020).

Such an element is the difference of nearly equal numbers, or another function that makes much of a rounding. Its error
is a matter of luck: where eager has one such element, right code is three times worse in every fifth run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log, sqrt

import torch

from exportkit.accuracy import allowed_error, eager_error
from exportkit.export.record.eager_run import EagerRun
from exportkit.export.record.reference import References, SessionReferences
from exportkit.export.record.rounding import perturbed_answers
from exportkit.package.manifest import Accuracy, TensorOutput

_OUTLYING = 2  # times what the greatest of so many normal errors is
_RUNS = 4
_MOST = 4  # times eager's: beyond, rounding decides between values


def with_outlier_errors(known: SessionReferences, eager_run: EagerRun) -> SessionReferences:
    """Takes the greatest error from several runs where it is far above the others.

    Args:
        known: What eager should have answered, with its errors.
        eager_run: What eager answered.
    """
    parts = [_Part(references, answered.results) for references, answered in zip(known.parts, eager_run.parts)]
    for seed in range(_RUNS if any(part.outliers for part in parts) else 0):
        run = perturbed_answers(eager_run, seed)
        if run is not None and not run.undefined:
            for part, results in zip(parts, run.parts):
                part.see(results)
    return replace(known, parts=tuple(part.references for part in parts))


class _Part:
    """One call, or the state after all.

    Attributes:
        references: Its references, with the greatest errors so far; None where it has none.
        outliers: Eager's errors in the outputs in which few elements have nearly all of it.
    """

    def __init__(self, references: References | None, outputs: Sequence[TensorOutput]) -> None:
        self.references = references
        self.outliers: dict[TensorOutput, Accuracy] = {}
        if references is None:
            return
        for output in outputs:
            error = references.accuracy.get(output.name)
            if error and is_outlier(error, output.dtype, references.outputs[output.name].numel()):
                self.outliers[output] = error

    def see(self, results: Mapping[str, torch.Tensor]) -> None:
        """Learns the errors of a run."""
        if self.references is None:
            return
        known, found = self.references.outputs, dict(self.references.accuracy)
        theirs = {name: each.detach().cpu() for name, each in results.items()}
        for output, eager in self.outliers.items():
            so_far, reference = found[output.name], known[output.name]
            same = output.name in theirs and theirs[output.name].shape == reference.shape
            if so_far is not None and same:
                greatest = min(eager_error(output, theirs, known).greatest, _MOST * eager.greatest)
                if greatest > so_far.greatest:  # the rms error grows by what one element brings
                    more = (greatest**2 - eager.greatest**2) / reference.numel()
                    found[output.name] = Accuracy(rms=sqrt(eager.rms**2 + more), greatest=greatest)
        self.references = replace(self.references, accuracy=found)


def is_outlier(error: Accuracy, dtype: str, count: int) -> bool:
    """Returns whether the greatest of `count` errors is far above the others, and above what every output may have."""
    floor = allowed_error(Accuracy(rms=0.0, greatest=0.0), dtype).greatest
    return error.greatest > _OUTLYING * error.rms * sqrt(2 * log(max(count, 2))) and 3 * error.greatest > floor
