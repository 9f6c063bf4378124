"""How two answers differ, in words."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Tolerance = Callable[[torch.dtype], tuple[float, float]]  # (rtol, atol) of a dtype


def difference(actual: Tensor, expected: Tensor, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """Says how two tensors differ, such as "2 of 6 elements differ, first [0, 1]: 1.5 and 1.0". NaN equals NaN."""
    if actual.shape != expected.shape:
        return f"the shapes are {list(actual.shape)} and {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"the dtypes are {actual.dtype} and {expected.dtype}"
    if actual.device != expected.device:
        return f"the devices are {actual.device} and {expected.device}"
    if actual.is_floating_point() or actual.is_complex():
        equal = torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    elif atol and actual.dtype != torch.bool:  # of integers, such as quantized ones
        equal = (actual.double() - expected.double()).abs() <= atol
    else:
        equal = actual == expected
    if bool(equal.all()):
        return None
    wrong = int(equal.numel() - equal.sum())
    where = (~equal).nonzero()[0].tolist()
    values = f"{actual[tuple(where)].item()!r} and {expected[tuple(where)].item()!r}"
    return f"{wrong} of {equal.numel()} elements differ, first {where}: {values}"


def shortened(text: str, most: int = 400) -> str:
    """Returns a text in one line, without a full stop; of a long one the first sentences, or its first words."""
    line = " ".join(text.split())
    if len(line) > most:
        line = line[:most].rpartition(". ")[0] or line[:most].rpartition(" ")[0] + " ..."
    return line.removesuffix(".")


def first_difference(
    actual: list[Tensor], expected: list[Tensor], tolerance: Tolerance = lambda dtype: (0.0, 0.0)
) -> str | None:
    """Says which tensor of two answers is the first that differs, and how."""
    if len(actual) != len(expected):
        return f"there are {len(actual)} and {len(expected)} outputs"
    for index, (a, e) in enumerate(zip(actual, expected)):
        rtol, atol = tolerance(e.dtype)
        if text := difference(a, e, rtol, atol):
            return f"in output {index}: {text}" + (f" (rtol {rtol:g}, atol {atol:g})" if rtol or atol else "")
    return None
