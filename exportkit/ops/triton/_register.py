"""Registration of operators whose kernels are Triton's."""

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
"""Triton comes with torch's CUDA builds for Linux, and not with its CPU builds."""

LONGEST_HELD = 16384
"""Elements of a row that a program holds in registers."""


def triton_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Defines `arr_coc_triton::<name>` by a function that is its kernel, its fake and its decomposition at once."""

    def register(function: Callable[..., Any]) -> Any:
        with _no_word_of_missing_triton():
            return torch.library.triton_op(f"{NAMESPACE}::{name}", function, mutates_args=())

    return register


def runs_triton(tensor: Tensor) -> bool:
    """Whether a Triton kernel can compute on this (perhaps fake) tensor."""
    return HAS_TRITON and tensor.is_cuda


def rows_and_columns(x: Tensor) -> tuple[int, int]:
    """Of a contiguous tensor whose last dimension is a row."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows, x.shape[-1]


def tile(columns: int, elements: int) -> tuple[int, int] | None:
    """(rows of a program, power of two that holds a row) for about so many elements a program.

    None for a row that is too long to hold, or whose length is symbolic: a kernel holds as much as it was compiled for.
    """
    if not isinstance(columns, int) or columns > LONGEST_HELD:
        return None
    block = 1 << max(columns - 1, 0).bit_length()
    return max(1, elements // block), block


def programs(items: int, of_one: int) -> tuple[int]:
    """The grid of a kernel whose programs take `of_one` items each."""
    return ((items + of_one - 1) // of_one,)


@contextmanager
def _no_word_of_missing_triton() -> Iterator[None]:
    """Silences torch's warning that Triton is not available, where nobody asked for it."""
    logger = logging.getLogger("torch._library.triton")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
