"""Compares outputs with a reference, or with eager's within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from msgspec import UnsetType, structs

from exportkit.accuracy import (
    allowed_error,
    differences,
    distance,
    eager_error,
    measure_error,
    rows_at,
    typical_magnitude,
    whole_rows,
)
from exportkit.package.case_files import explains, worst
from exportkit.package.manifest import Accuracy, OutputTolerance, TensorOutput
from exportkit.sizes import contradicts, shape_at
from exportkit.verify.comparisons import OutputComparison, OutputError
from exportkit.verify.outcomes import WrongDtype, WrongShape, WrongStructure
from exportkit.verify.value_verdicts import Judged, judged


@dataclass(frozen=True)
class Reference:
    """What eager should have answered, for the outputs whose accuracy is known.

    Attributes:
        outputs: By output, its value in a wider dtype; for an output of indices, the indices.
        errors: By output, eager's errors in the recorded cases.
        fresh: Whether eager was run for this comparison. Its error in this call then counts as well.
        moves: By output, how far eager moves from its answer when it rounds otherwise.
    """

    outputs: Mapping[str, torch.Tensor]
    errors: Mapping[str, Sequence[Accuracy]]
    fresh: bool = False
    moves: Mapping[str, Accuracy] = field(default_factory=dict)


def compare_outputs(
    outputs: Sequence[TensorOutput],
    expected: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
    *,
    reference: Reference | None = None,
    sizes: Mapping[str, int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Judged | WrongDtype | WrongShape | WrongStructure:
    """Compares the outputs of a call with the expected outputs, by the rule of FORMAT.md, "Verdicts".

    Dtypes and shapes are compared before values. NaN equals NaN, and an infinity equals itself. Integers and booleans
    must be equal unless their recorded tolerance is not zero.

    Args:
        outputs: The manifest's outputs in flat order.
        expected: Eager's outputs, one tensor each, on any device.
        actual: One tensor per output, on any device.
        reference: What eager should have answered. An output without it is held to its recorded tolerance.
        sizes: The sizes of the call by dimension, to compare the shapes with the manifest too.
        rtol: Replaces, together with `atol`, the reference and the recorded tolerances of floating outputs.
        atol: See `rtol`.
    """
    if not len(outputs) == len(expected) == len(actual):
        count = f"{len(outputs)} in the manifest, {len(expected)} expected"
        return WrongStructure(expected=f"{len(outputs)} tensors", actual=f"{len(actual)} tensors ({count})")
    for output, want, got in zip(outputs, expected, actual):
        if got.dtype != want.dtype:
            return WrongDtype(output.name, _dtype_name(want.dtype), _dtype_name(got.dtype))
    for output, want, got in zip(outputs, expected, actual):
        if got.shape != want.shape:
            return WrongShape(output.name, tuple(want.shape), tuple(got.shape))
        if sizes is not None and contradicts(output, got.shape, sizes):
            return WrongShape(output.name, tuple(shape_at(output, sizes)), tuple(got.shape))
    comparison = _Comparison(
        {output.name: output for output in outputs},
        {output.name: _allowed(output, rtol, atol) for output in outputs},
        {output.name: want.detach().cpu() for output, want in zip(outputs, expected)},
        {output.name: got.detach().cpu() for output, got in zip(outputs, actual)},
        reference if rtol is None and reference is not None else Reference({}, {}),
    )
    return judged(comparison.of(output.name) for output in outputs)


def _allowed(output: TensorOutput, rtol: float | None, atol: float | None) -> OutputTolerance:
    tolerance = output.tolerance
    if rtol is None or atol is None or output.dtype.startswith(("int", "uint", "bool")):
        return tolerance
    return structs.replace(tolerance, rtol=rtol, atol=atol)


@dataclass(frozen=True)
class _Comparison:
    """The outputs of one call by name, and what they are compared with."""

    outputs: Mapping[str, TensorOutput]
    tolerances: Mapping[str, OutputTolerance]
    wanted: Mapping[str, torch.Tensor]
    given: Mapping[str, torch.Tensor]
    reference: Reference

    def of(self, name: str) -> OutputComparison:
        found, moves = self._compared(name), self.reference.moves.get(name)
        if found.agrees or moves is None or not explains(moves, distance(self.wanted[name], self.given[name])):
            return found
        return replace(found, moves=moves)

    def _compared(self, name: str) -> OutputComparison:
        of = self.tolerances[name].ranking_of
        if of is not None and name in self.reference.outputs and self._has_reference(of):
            # The places of a ranking are as uncertain as the values that it ranks.
            error = self._allowed_error(of).greatest
            typical = typical_magnitude(self.reference.outputs[of])
            return self._ranking(name, self.reference.outputs, OutputTolerance(rtol=error, atol=error * typical))
        if of is not None:
            return self._ranking(name, self.wanted, self.tolerances[of])
        result = self._difference_from_eager(name)
        return self._error(name, result) if self._has_reference(name) else result

    def _has_reference(self, name: str) -> bool:
        return name in self.reference.outputs and self.wanted[name].is_floating_point()

    def _allowed_error(self, name: str) -> Accuracy:
        output, errors = self.outputs[name], list(self.reference.errors.get(name, ()))
        if self.reference.fresh:
            errors.append(eager_error(output, self.wanted, self.reference.outputs))
        return allowed_error(worst(errors), output.dtype)

    def _difference_from_eager(self, name: str) -> OutputComparison:
        tolerance, wanted, given = self.tolerances[name], self.wanted[name], self.given[name]
        if tolerance.rows_of is None:
            return compare_tensors(name, wanted, given, tolerance.rtol, tolerance.atol)
        agree = self.wanted[tolerance.rows_of] == self.given[tolerance.rows_of]
        result = compare_tensors(name, wanted, given, tolerance.rtol, tolerance.atol, whole_rows(agree, wanted))
        if result.compared == wanted.numel():
            return result
        rows = f"{int(agree.sum())} of {agree.numel()} rows compared: those whose `{tolerance.rows_of}` agree"
        return replace(result, note=rows)

    def _error(self, name: str, difference: OutputComparison) -> OutputComparison:
        """Judges an output by its error, and keeps its difference from eager as information."""
        reference, given, rows_of = self.reference.outputs, self.given[name], self.tolerances[name].rows_of
        values, found = rows_at(self.outputs[name], reference, self.given)
        allowed = self._allowed_error(name)
        typical = typical_magnitude(reference[name])
        measured = measure_error(values, given, found, typical=typical, limit=allowed.greatest)
        note = None
        if measured.compared < given.numel():
            compared = f"{measured.compared} of {given.numel()} elements compared"
            note = f"{compared}: the rows of `{rows_of}` that the reference has"
        return replace(
            difference,
            compared=measured.compared,
            mismatched=measured.beyond,
            error=OutputError(
                rms=measured.size.rms,
                rms_allowed=allowed.rms,
                greatest=measured.size.greatest,
                greatest_allowed=allowed.greatest,
                greatest_at=_place(measured.greatest_at, given.shape),
            ),
            note=note,
        )

    def _ranking(self, name: str, expected: Mapping[str, torch.Tensor], tolerance: OutputTolerance) -> OutputComparison:
        of, dim = self.tolerances[name].ranking_of, self.tolerances[name].dim
        assert of is not None
        ranked = _Ranked(of, expected[of], self.given[of], -1 if isinstance(dim, UnsetType) else dim)
        return _compare_ranking(name, expected[name], self.given[name], ranked, tolerance)


def compare_tensors(
    name: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    rtol: float,
    atol: float,
    selected: torch.Tensor | None = None,
) -> OutputComparison:
    """Compares two tensors element by element: |actual - expected| <= atol + rtol * |expected|.

    Both are on the CPU, of one dtype and shape. `selected` says which elements count; by default all do.
    """
    difference, magnitude = differences(expected, actual)
    counts = torch.ones_like(difference, dtype=torch.bool) if selected is None else selected
    wrong = (difference > atol + rtol * magnitude) & counts
    # An infinite expected value would allow any difference.
    wrong |= difference.isinf() & counts
    relative = torch.where(difference == 0, torch.zeros_like(difference), difference / magnitude)
    described = name, _dtype_name(expected.dtype), tuple(expected.shape), int(counts.sum()), int(wrong.sum())
    return OutputComparison(*described, *_greatest(difference, counts), *_greatest(relative, counts), rtol, atol)


class _Ranked(NamedTuple):
    """Values [..., N, ...] that indices rank along a dimension."""

    name: str
    expected: torch.Tensor
    actual: torch.Tensor
    dim: int

    def last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Moves the dimension of values or indices to the end. Indices of `argmax` do not have it, and get it."""
        whole = tensor if tensor.dim() == self.expected.dim() else tensor.unsqueeze(self.dim)
        return whole.movedim(self.dim, -1)


def _compare_ranking(
    name: str, expected_at: torch.Tensor, actual_at: torch.Tensor, ranked: _Ranked, tolerance: OutputTolerance
) -> OutputComparison:
    """Compares indices [..., K, ...] that rank values [..., N, ...].

    The k-th greatest value moves by no more than the values do. So the value that `actual` picked at place k must be
    within the values' tolerance of the value that `expected` picked there. The indices may differ, because two values
    closer than the tolerance may change places.
    """
    expected, actual = ranked.last(expected_at), ranked.last(actual_at)
    expected_values, actual_values = ranked.last(ranked.expected), ranked.last(ranked.actual)
    count = expected_values.shape[-1]
    differs = actual != expected
    outside = (actual < 0) | (actual >= count)
    picked = actual_values.gather(-1, actual.clamp(0, max(count - 1, 0))) if count else actual.double()
    wanted = expected_values.gather(-1, expected.clamp(0, max(count - 1, 0))) if count else expected.double()
    difference, magnitude = differences(wanted, picked)
    too_far = (difference > tolerance.atol + tolerance.rtol * magnitude) | difference.isinf()
    ordered, order = actual.sort(dim=-1, stable=True)
    again = torch.zeros_like(differs)
    if actual.shape[-1] > 1:
        twice = ordered[..., 1:] == ordered[..., :-1]
        repeated = torch.zeros_like(differs)
        repeated[..., 1:] |= twice
        repeated[..., :-1] |= twice
        again.scatter_(-1, order, repeated)
    wrong = differs & (outside | too_far | again)
    tied = int((differs & ~wrong).sum())
    notes = [f"{tied} indices differ where `{ranked.name}` ties within its tolerance"] if tied else []
    for which, what in ((outside, f"are outside 0..{count - 1}"), (again, "repeat")):
        if found := int((differs & which).sum()):
            notes.append(f"{found} indices {what}")
    in_place = [each.movedim(-1, ranked.dim).reshape(expected_at.shape) for each in (difference, differs & ~outside)]
    gap, gap_at = _greatest(*in_place)
    if gap:
        notes.append(f"greatest gap in `{ranked.name}` {gap:.3g} at {gap_at} (up to {tolerance.atol:.3g} allowed)")
    described = name, _dtype_name(expected.dtype), tuple(expected_at.shape), expected.numel(), int(wrong.sum())
    return OutputComparison(
        *described, None, None, None, None, tolerance.rtol, tolerance.atol, "; ".join(notes) or None
    )


def _greatest(values: torch.Tensor, counts: torch.Tensor) -> tuple[float | None, tuple[int, ...] | None]:
    if not bool(counts.any()):
        return None, None
    values = torch.where(counts, values.nan_to_num(nan=0.0, posinf=torch.inf), torch.full_like(values, -1.0))
    at = _place(int(values.argmax()), values.shape)
    return float(values[at]), at


def _place(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the index of an element in a tensor of this shape; zeros if the tensor is empty."""
    if 0 in shape:
        return (0,) * len(shape)
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
