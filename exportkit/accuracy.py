"""How far an output is from its reference, and how far it may be: FORMAT.md, "Verdicts". csrc/package computes both."""

from __future__ import annotations

import ctypes
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

    Attributes:
        size: The root of the mean square, and the greatest error.
        compared: The number of elements.
        beyond: The number of elements whose error exceeds the limit.
        greatest_at: The flat index of the greatest error.
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
    """Compares values with their reference. Two NaNs are equal, and an infinity equals itself.

    Args:
        reference: A floating tensor on the CPU.
        values: A floating tensor of the same shape on the CPU.
        selected: A boolean tensor of the same shape that selects elements. Default: all.
        typical: The typical magnitude of the whole reference.
        limit: The error that an element may have.
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

    Args:
        output: The output. If it is not `rows_of` an index output, its reference is returned as it is.
        reference: The references by output, with the indices of the rows.
        given: The outputs to compare with, with their indices of the rows.

    Returns:
        The reference, and a mask of the elements whose row the reference has; None for all.
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


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().contiguous()
