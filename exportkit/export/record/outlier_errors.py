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
from exportkit.export.record.reference import References
from exportkit.export.record.rounding import perturbed_answers
from exportkit.package.manifest import Accuracy, TensorOutput

_OUTLYING = 2  # times what the greatest of so many normal errors is
_RUNS = 4
_MOST = 4  # times eager's: beyond, rounding decides between values


def with_outlier_errors(known: Sequence[References | None], eager_run: EagerRun) -> list[References | None]:
    """Takes eager's greatest error from several runs where it is far above the others."""
    parts = list(known)
    outliers = [_outliers(references, answered.results) for references, answered in zip(parts, eager_run.parts)]
    for seed in range(_RUNS if any(outliers) else 0):
        if (run := perturbed_answers(eager_run, seed)) is not None:
            seen = zip(parts, outliers, run)
            parts = [references and _learned(references, few, results) for references, few, results in seen]
    return parts


def _outliers(references: References | None, outputs: Sequence[TensorOutput]) -> dict[TensorOutput, Accuracy]:
    """Returns eager's errors in the outputs in which few elements have nearly all of it."""
    found: dict[TensorOutput, Accuracy] = {}
    if references is None:
        return found
    for output in outputs:
        error = references.accuracy.get(output.name)
        if error and is_outlier(error, output.dtype, references.outputs[output.name].numel()):
            found[output] = error
    return found


def _learned(
    references: References, outliers: Mapping[TensorOutput, Accuracy], results: Mapping[str, torch.Tensor]
) -> References:
    """Returns references with the errors of a run where these are the greatest so far."""
    known, found = references.outputs, dict(references.accuracy)
    theirs = {name: each.detach().cpu() for name, each in results.items()}
    for output, eager in outliers.items():
        so_far, reference = found[output.name], known[output.name]
        same = output.name in theirs and theirs[output.name].shape == reference.shape
        if so_far is not None and same:
            greatest = min(eager_error(output, theirs, known).greatest, _MOST * eager.greatest)
            if greatest > so_far.greatest:  # the rms error grows by what one element brings
                more = (greatest**2 - eager.greatest**2) / reference.numel()
                found[output.name] = Accuracy(rms=sqrt(eager.rms**2 + more), greatest=greatest)
    return replace(references, accuracy=found)


def is_outlier(error: Accuracy, dtype: str, count: int) -> bool:
    """Returns whether the greatest of `count` errors is far above the others, and above what every output may have."""
    floor = allowed_error(Accuracy(rms=0.0, greatest=0.0), dtype).greatest
    return error.greatest > _OUTLYING * error.rms * sqrt(2 * log(max(count, 2))) and 3 * error.greatest > floor
