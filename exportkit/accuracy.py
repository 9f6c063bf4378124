"""How far an output is from its reference or from eager's, and how far it may be: FORMAT.md, "Verdicts"."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from ctypes import byref, c_double, c_size_t, c_void_p
from dataclasses import dataclass
from math import inf

import torch

from exportkit.package import core
from exportkit.package.manifest import Accuracy, TensorOutput


@dataclass(frozen=True)
class MeasuredError:
    """The error of some elements, relative to the reference's magnitude or the typical one, whichever is greater.

    `size` is the root of the mean square, and the greatest error, which is at a flat index. As many elements were
    compared, and some of them are beyond the limit.
    """

    size: Accuracy
    compared: int
    beyond: int
    greatest_at: int


class _Accuracy(ctypes.Structure):
    _fields_ = (("rms", c_double), ("greatest", c_double))

    def read(self) -> Accuracy:
        return Accuracy(rms=self.rms, greatest=self.greatest)


class _MeasuredError(ctypes.Structure):
    _fields_ = (("size", _Accuracy), ("compared", c_size_t), ("beyond", c_size_t), ("greatest_at", c_size_t))


def typical_magnitude(reference: torch.Tensor) -> float:
    """Returns the median magnitude of the elements that are neither 0 nor infinite nor NaN; 1 if there is none."""
    wide = _wide(reference)
    found = c_double()
    core.call("ek_typical_magnitude", wide.data_ptr(), wide.numel(), byref(found))
    return found.value


def measure_error(
    reference: torch.Tensor,
    values: torch.Tensor,
    selected: torch.Tensor | None = None,
    *,
    typical: float,
    limit: float = inf,
) -> MeasuredError:
    """Compares values, or selected ones, with their reference. Two NaNs are equal, and an infinity equals itself.

    The tensors are on the CPU, floating and of one shape. `typical` is the typical magnitude of the whole reference;
    `limit` is the error that an element may have.
    """
    wide, given = _wide(reference), _wide(values)
    chosen = None if selected is None else selected.contiguous()
    found = _MeasuredError()
    pointer = c_void_p(None if chosen is None else chosen.data_ptr())
    core.call(
        "ek_measure_error", wide.data_ptr(), given.data_ptr(), pointer, wide.numel(), typical, limit, byref(found)
    )
    return MeasuredError(found.size.read(), found.compared, found.beyond, found.greatest_at)


def allowed_error(eager: Accuracy, dtype: str) -> Accuracy:
    """Returns the greatest error that a package may have in an output of this dtype where eager has this one."""
    found = _Accuracy()
    core.call("ek_allowed_error", byref(_Accuracy(eager.rms, eager.greatest)), dtype.encode(), byref(found))
    return found.read()


def eager_error(
    output: TensorOutput, eager: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> Accuracy:
    """Returns how far eager is from the reference in one output. Both have tensors on the CPU by output."""
    values, found = rows_at(output, reference, eager)
    return measure_error(values, eager[output.name], found, typical=typical_magnitude(reference[output.name])).size


def rows_at(
    output: TensorOutput, reference: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the reference of an output, with its rows in the order of the given indices.

    An output that is not `rows_of` an index output has its reference as it is. By output, there are the references and
    what to compare with, with their indices of the rows. Beside it is a mask of the elements whose row the reference
    has; None for all.
    """
    values, rows_of = reference[output.name], output.tolerance.rows_of
    if rows_of is None:
        return values, None
    known, wanted = reference[rows_of], given[rows_of]
    if not wanted.numel():
        return values, whole_rows(torch.zeros_like(wanted, dtype=torch.bool), values)
    ordered, order = known.sort(dim=-1, stable=True)
    place = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=wanted.shape[-1] - 1)
    found = ordered.gather(-1, place) == wanted
    row = whole_rows(order.gather(-1, place), values)
    return values.gather(wanted.dim() - 1, row), whole_rows(found, values)


def whole_rows(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Expands a value for each row to the elements of the rows."""
    return rows.reshape(rows.shape + (1,) * (like.dim() - rows.dim())).expand(like.shape)


def differences(expected: torch.Tensor, actual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def distance(expected: torch.Tensor, actual: torch.Tensor) -> Accuracy:
    """Returns how far one result is from another: absolutely, and of integers and booleans which share is another."""
    difference, _ = differences(expected, actual)
    if not (expected.is_floating_point() or expected.is_complex()):
        difference = (difference > 0).double()
    if not difference.numel():
        return Accuracy(rms=0.0, greatest=0.0)
    # A file has no infinity.
    found = difference.square().mean().sqrt(), difference.max()
    rms, greatest = (min(float(each), sys.float_info.max) for each in found)
    return Accuracy(rms=rms, greatest=greatest)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().contiguous()
