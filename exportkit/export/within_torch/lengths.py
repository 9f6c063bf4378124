"""Lets `len(tensor)` vary while a model is traced. Python's own makes a number of it, which would fix the size."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from exportkit.export.within_torch.torch_internals import replaced


@contextmanager
def varying_lengths() -> Iterator[None]:
    """Makes `len` of a tensor whose first size varies that size, while the block runs."""
    with replaced(builtins, "len", _of_tensors):
        yield


def _of_tensors(original: Callable[[Any], int]) -> Callable[[Any], int | torch.SymInt]:
    def len(of: Any, /) -> int | torch.SymInt:
        # Python also lets a class say what its len is, and a scalar has none.
        if isinstance(of, torch.Tensor) and type(of).__len__ is torch.Tensor.__len__ and of.dim():
            size = of.shape[0]
            if isinstance(size, torch.SymInt):
                return size
        return original(of)

    return len
