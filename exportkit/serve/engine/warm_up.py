"""Calls a model with its recorded cases before it is ready: it must answer them, and its rows must be independent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from exportkit.errors import ExportkitError, ModelRunError
from exportkit.package.case_files import recorded_errors
from exportkit.package.manifest import ANY_VALUE, FIRST_WITH_REFERENCES, Dimension, Manifest
from exportkit.runtime.model import LoadedCase
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.model_copy import ModelCopy, tensors_in
from exportkit.serve.engine.transfer import HostTransfer
from exportkit.serve.statuses import BackendError
from exportkit.verify.compare import Match, Reference, compare_outputs

_TRIED_REQUESTS = 8
_MAX_TRIED_BYTES = 256 << 20  # of the inputs of one call that tries a batch

_Flat = list[torch.Tensor]


def answer_cases(copy: ModelCopy, *, compared: bool) -> None:
    """Runs the recorded cases.

    Args:
        copy: The model.
        compared: Whether the answers must be the recorded ones. With other weights than the package's they are not.

    Raises:
        BackendError: The model fails, or an answer is beyond its tolerance.
    """
    manifest = copy.model.manifest
    for index, case in enumerate(copy.model.cases):
        try:
            answers = copy.call(flat_inputs(manifest, case))
        except ExportkitError as error:
            raise BackendError(f"the model fails on its recorded case {index}: {error.message}") from error
        if not compared:
            continue
        known = case.references if manifest.format_version >= FIRST_WITH_REFERENCES else {}
        reference = Reference(known, recorded_errors(manifest.cases))
        verdict = compare_outputs(
            manifest.call.outputs, tensors_in(case.outputs), answers, reference=reference, sizes=case.sizes
        )
        if not isinstance(verdict, Match):
            raise BackendError(
                f"the model answers its recorded case {index} wrongly on {copy.device}: {verdict.message}",
                hint="`exportkit verify` says more about it.",
            )


def try_batches(copy: ModelCopy, dimension: Dimension, max_rows: int) -> Batching:
    """Finds out whether the answer to a row depends on the rows that are called with it.

    Rows of the recorded cases are called in small requests, then together: two requests, all of them, and as many as a
    batch holds. There are up to eight different requests. Where the cases have fewer rows, rows of floating inputs are
    rolled to make others; integers stay as they are, because an index in another place may be out of range there.

    Args:
        copy: The model.
        dimension: The dimension whose rows may be independent, by the manifest.
        max_rows: The most rows of a batch.
    """
    manifest = copy.model.manifest
    if vague := [output.name for output in manifest.call.outputs if output.tolerance.atol >= ANY_VALUE]:
        return Batching(None, f"the values of `{vague[0]}` need not repeat, so its rows cannot be compared")
    fewest = max(dimension.min, 1)
    tried, bit_equal = 0, True
    for requests in _requests(copy, fewest):
        answers = _answered(copy, requests)
        size = sum(tensor.nbytes for inputs, _ in answers for tensor in inputs) // max(len(answers), 1)
        most = min(max_rows // fewest, max(2, _MAX_TRIED_BYTES // max(size, 1)))
        if varying := _varying_output(manifest, [outputs for _, outputs in answers]):
            return Batching(None, f"the sizes of `{varying}` depend on the values of inputs")
        for count in sorted({2, min(len(answers), most), most}) if len(answers) > 1 else ():
            parts = [answers[-place % len(answers)] for place in range(count)]  # the first, then from the last on
            together = copy.call(_joined([inputs for inputs, _ in parts]))
            alone = _joined([outputs for _, outputs in parts])
            verdict = compare_outputs(manifest.call.outputs, alone, together)
            if not isinstance(verdict, Match):
                return Batching(None, f"rows influence one another: {verdict.message.splitlines()[0]}")
            bit_equal &= all(map(_same_bits, alone, together))
            tried += 1
    if not tried:
        return Batching(None, "the package has no recorded case that shows that rows do not influence one another")
    return Batching(dimension, bit_equal=bit_equal)


def _requests(copy: ModelCopy, fewest: int) -> Iterator[list[_Flat]]:
    """Yields small requests from the recorded cases: lists of those that fit together."""
    found: dict[object, list[_Flat]] = {}
    for case in copy.model.cases:
        inputs = flat_inputs(copy.model.manifest, case)
        pieces = found.setdefault(tuple(tensor.shape[1:] for tensor in inputs), [])
        for start in range(0, inputs[0].shape[0] - fewest + 1, fewest):
            pieces.append([tensor[start : start + fewest] for tensor in inputs])
    for pieces in found.values():
        missing = max(_TRIED_REQUESTS - len(pieces), 0) if pieces else 0
        rolled = [[_rolled(tensor, 1 + turn) for tensor in pieces[turn % len(pieces)]] for turn in range(missing)]
        yield [*pieces[:_TRIED_REQUESTS], *rolled]


def _answered(copy: ModelCopy, requests: Iterable[_Flat]) -> list[tuple[_Flat, _Flat]]:
    """Returns the requests that the model can answer, with their answers: rolled rows may make no sense to it."""
    answers = []
    for inputs in requests:
        with contextlib.suppress(ModelRunError):
            answers.append((inputs, copy.call(inputs)))
    return answers


def _varying_output(manifest: Manifest, answers: Sequence[_Flat]) -> str | None:
    """Returns an output whose rows have different sizes for requests of the same sizes."""
    for described, outputs in zip(manifest.call.outputs, zip(*answers)):
        if len({output.shape[1:] for output in outputs}) > 1:
            return described.name
    return None


def _joined(parts: Sequence[_Flat]) -> _Flat:
    return HostTransfer().join([[tensor.contiguous() for tensor in part] for part in parts])


def flat_inputs(manifest: Manifest, case: LoadedCase) -> list[torch.Tensor]:
    """Returns the flat inputs of a recorded case."""
    positional = iter(case.args)
    values = [next(positional) if p.kind == "positional" else case.kwargs[p.name] for p in manifest.call.parameters]
    return tensors_in(values)


def _rolled(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Returns rows of floating numbers with the same values in other places; others as they are."""
    if not rows.is_floating_point() or rows.dim() == 1:
        return rows
    return rows.flatten(1).roll(by, dims=1).view(rows.shape)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
