"""Compares outputs with expected outputs. Each output has a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from exportkit.package.manifest import OutputTolerance, TensorOutput
from exportkit.verify.outcomes import Match, Mismatch, OutputComparison, WrongDtype, WrongShape, WrongStructure


def compare_outputs(
    outputs: Sequence[TensorOutput],
    expected: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> Match | Mismatch | WrongDtype | WrongShape | WrongStructure:
    """Compares the outputs of a call with the expected outputs.

    Dtypes and shapes are compared before values. NaN equals NaN, and an infinity equals itself. Integers and booleans
    must be equal unless their recorded tolerance is not zero.

    Args:
        outputs: The manifest's outputs in flat order.
        expected: One tensor per output, on any device.
        actual: One tensor per output, on any device.
        rtol: Replaces, together with `atol`, the recorded tolerances of floating outputs.
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
    tolerances = {output.name: _allowed(output, rtol, atol) for output in outputs}
    wanted = {output.name: want.detach().cpu() for output, want in zip(outputs, expected)}
    given = {output.name: got.detach().cpu() for output, got in zip(outputs, actual)}
    compared = tuple(_compare(output.name, tolerances, wanted, given) for output in outputs)
    return Mismatch(compared) if any(output.mismatched for output in compared) else Match(compared)


def _allowed(output: TensorOutput, rtol: float | None, atol: float | None) -> OutputTolerance:
    tolerance = output.tolerance
    if rtol is None or atol is None or output.dtype.startswith(("int", "uint", "bool")):
        return tolerance
    return OutputTolerance(rtol=rtol, atol=atol, ranking_of=tolerance.ranking_of, rows_of=tolerance.rows_of)


def _compare(
    name: str,
    tolerances: Mapping[str, OutputTolerance],
    wanted: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
) -> OutputComparison:
    tolerance = tolerances[name]
    if tolerance.ranking_of is not None:
        of = tolerance.ranking_of
        return _compare_ranking(name, wanted[name], given[name], of, wanted[of], given[of], tolerances[of])
    selected = None
    if tolerance.rows_of is not None:
        agree = wanted[tolerance.rows_of] == given[tolerance.rows_of]
        selected = agree.reshape(agree.shape + (1,) * (wanted[name].dim() - agree.dim())).expand(wanted[name].shape)
        rows = f"{int(agree.sum())} of {agree.numel()} rows compared: those whose `{tolerance.rows_of}` agree"
    result = compare_tensors(name, wanted[name], given[name], tolerance.rtol, tolerance.atol, selected)
    if selected is not None and result.compared < wanted[name].numel():
        return replace(result, note=rows)
    return result


def compare_tensors(
    name: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    rtol: float,
    atol: float,
    selected: torch.Tensor | None = None,
) -> OutputComparison:
    """Compares two tensors element by element: |actual - expected| <= atol + rtol * |expected|.

    Args:
        name: The output's name.
        expected: A tensor on the CPU.
        actual: A tensor on the CPU, of the same dtype and shape.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        selected: Boolean tensor of the same shape that selects the elements to compare. Default: all.
    """
    difference, magnitude = _difference(expected, actual)
    counts = torch.ones_like(difference, dtype=torch.bool) if selected is None else selected
    wrong = (difference > atol + rtol * magnitude) & counts
    # An infinite expected value would allow any difference.
    wrong |= difference.isinf() & counts
    relative = torch.where(difference == 0, torch.zeros_like(difference), difference / magnitude)
    max_abs, max_abs_at = _greatest(difference, counts)
    max_rel, max_rel_at = _greatest(relative, counts)
    return OutputComparison(
        name=name,
        dtype=_dtype_name(expected.dtype),
        shape=tuple(expected.shape),
        compared=int(counts.sum()),
        mismatched=int(wrong.sum()),
        max_abs=max_abs,
        max_abs_at=max_abs_at,
        max_rel=max_rel,
        max_rel_at=max_rel_at,
        rtol=rtol,
        atol=atol,
    )


def _compare_ranking(
    name: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    of: str,
    expected_values: torch.Tensor,
    actual_values: torch.Tensor,
    tolerance: OutputTolerance,
) -> OutputComparison:
    """Compares indices [..., K] that rank values [..., N].

    The k-th greatest value moves by no more than the values do. So the value that `actual` picked at place k must be
    within the values' tolerance of the value that `expected` picked there. The indices may differ, because two values
    closer than the tolerance may change places.
    """
    count = expected_values.shape[-1]
    differs = actual != expected
    outside = (actual < 0) | (actual >= count)
    picked = actual_values.gather(-1, actual.clamp(0, max(count - 1, 0))) if count else actual.double()
    wanted = expected_values.gather(-1, expected.clamp(0, max(count - 1, 0))) if count else expected.double()
    difference, magnitude = _difference(wanted, picked)
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
    notes = [f"{tied} indices differ where `{of}` ties within its tolerance"] if tied else []
    notes += (
        [f"{int((differs & outside).sum())} indices are outside 0..{count - 1}"]
        if bool((differs & outside).any())
        else []
    )
    notes += [f"{int((differs & again).sum())} indices repeat"] if bool((differs & again).any()) else []
    gap, gap_at = _greatest(difference, differs & ~outside)
    if gap:
        notes.append(f"greatest gap in `{of}` {gap:.3g} at {gap_at} (up to {tolerance.atol:.3g} allowed)")
    return OutputComparison(
        name=name,
        dtype=_dtype_name(expected.dtype),
        shape=tuple(expected.shape),
        compared=expected.numel(),
        mismatched=int(wrong.sum()),
        max_abs=None,
        max_abs_at=None,
        max_rel=None,
        max_rel_at=None,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        note="; ".join(notes) or None,
    )


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|actual - expected| and |expected| in float64. A difference is inf where only one side is NaN or infinite."""
    if expected.dtype.is_complex:
        same = (expected == actual) | (expected.isnan() & actual.isnan())
        wide_expected, wide_actual = expected.to(torch.complex128), actual.to(torch.complex128)
    elif not expected.dtype.is_floating_point:
        # int64 values are subtracted first: float64 would round them.
        if expected.dtype in (torch.int64, torch.uint64):
            difference = (actual.to(torch.int64) - expected.to(torch.int64)).abs().double()
            return difference, expected.double().abs()
        same, wide_expected, wide_actual = expected == actual, expected.double(), actual.double()
    else:
        # float8 types do not support comparison.
        wide_expected, wide_actual = expected.double(), actual.double()
        same = (wide_expected == wide_actual) | (wide_expected.isnan() & wide_actual.isnan())
    difference = (wide_actual - wide_expected).abs()
    difference = torch.where(same, torch.zeros_like(difference), difference)
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf), wide_expected.abs().nan_to_num(nan=0.0)


def _greatest(values: torch.Tensor, counts: torch.Tensor) -> tuple[float | None, tuple[int, ...] | None]:
    if not bool(counts.any()):
        return None, None
    values = torch.where(counts, values.nan_to_num(nan=0.0, posinf=torch.inf), torch.full_like(values, -1.0))
    flat = int(values.argmax())
    index = []
    for size in reversed(values.shape):
        index.append(flat % size)
        flat //= size
    at = tuple(reversed(index))
    return float(values[at]), at


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
