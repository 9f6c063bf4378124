"""Registers operators with Triton kernels."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "arr_coc_triton"

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed. torch's CUDA builds for Linux include it, CPU builds do not."""

LONGEST_HELD = 16384
"""The most elements of a row that a program holds in registers."""


def triton_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Defines `arr_coc_triton::<name>` by a function that serves as kernel, fake and decomposition."""

    def register(function: Callable[..., Any]) -> Any:
        with _no_word_of_missing_triton():
            return torch.library.triton_op(f"{NAMESPACE}::{name}", function, mutates_args=())

    return register


def runs_triton(tensor: Tensor) -> bool:
    """Returns whether a Triton kernel can compute on this tensor, which may be fake."""
    return HAS_TRITON and tensor.is_cuda


def rows_and_columns(x: Tensor) -> tuple[int, int]:
    """Returns the number of rows, and their length, of a contiguous tensor; the last dimension is a row."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows, x.shape[-1]


def tile(columns: int, elements: int) -> tuple[int, int] | None:
    """Returns (rows of a program, power of two that holds a row) for about `elements` elements per program.

    None if a row is too long for registers, or its length is symbolic: kernels are compiled for a fixed length.
    """
    if not isinstance(columns, int) or columns > LONGEST_HELD:
        return None
    block = 1 << max(columns - 1, 0).bit_length()
    return max(1, elements // block), block


def programs(items: int, of_one: int) -> tuple[int]:
    """Returns the grid of a kernel with `of_one` items per program."""
    return ((items + of_one - 1) // of_one,)


@contextmanager
def _no_word_of_missing_triton() -> Iterator[None]:
    """Silences torch's warning that Triton is not available."""
    logger = logging.getLogger("torch._library.triton")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
