"""Lets the rows of `torch.cdist` vary while a model is traced: torch chooses a formula by them, at 25 rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from exportkit.export.within_torch.torch_internals import replaced

_MOST_WITHOUT_PRODUCT = 25
_BY_PRODUCT, _BY_DIFFERENCES = 1, 2


@contextmanager
def varying_distances() -> Iterator[None]:
    """Chooses the formula for all numbers of rows, while the block runs.

    Where one of the two always has more than 25 rows it is torch's, by a matrix product. Otherwise it is the one by
    differences, which loses no digits, but takes longer for many rows.
    """
    with replaced(torch.functional, "_VF", _Functions):
        yield


class _Functions:
    """torch's functions, with another `cdist`."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._functions, name)
        return found

    def cdist(self, x1: torch.Tensor, x2: torch.Tensor, p: float, mode: int | None) -> torch.Tensor:
        rows = [x.shape[-2] for x in (x1, x2) if x.dim() > 1]
        if mode is None and any(isinstance(count, torch.SymInt) for count in rows):
            mode = _formula(rows)
        distances: torch.Tensor = self._functions.cdist(x1, x2, p, mode)
        return distances


def _formula(rows: Sequence[int | torch.SymInt]) -> int:
    many = any(statically_known_true(count > _MOST_WITHOUT_PRODUCT) for count in rows)
    return _BY_PRODUCT if many else _BY_DIFFERENCES
