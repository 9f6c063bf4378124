"""Checks for the fakes, with the messages of csrc/common/checks.h. A contract test compares the two."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING_NAMES = "float32, float64, float16 or bfloat16"


def check(holds: bool, message: str) -> None:
    """Raises RuntimeError, like a kernel, unless `holds`, which may be symbolic."""
    torch._check(holds, lambda: message)


def shape_of(tensor: Tensor) -> str:
    """Returns such as `[2, 3, 4]`, like the kernels."""
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    """Checks that the kernels can compute in the dtype."""
    holds = tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    check(holds, f"{op}: {name} must be {FLOATING_NAMES}, got {dtype_name(tensor.dtype)}")


def check_dtype(op: str, name: str, tensor: Tensor, expected: torch.dtype) -> None:
    """Checks that the dtype is `expected`."""
    check(tensor.dtype == expected, f"{op}: {name} must be {dtype_name(expected)}, got {dtype_name(tensor.dtype)}")


def check_rank(op: str, name: str, tensor: Tensor, rank: int, layout: str) -> None:
    """Checks the rank. `layout` names the dimensions for the message, such as "[B, N, D]"."""
    check(tensor.dim() == rank, f"{op}: {name} must be {layout}, got shape {shape_of(tensor)}")


def check_same_size(op: str, symbol: str, name: str, size: int, other_name: str, other_size: int) -> None:
    """Checks that two tensors' sizes are equal."""
    check(
        size == other_size,
        f"{op}: {name} has {symbol} = {size}, {other_name} has {symbol} = {other_size}; they must be equal",
    )


def check_alike(op: str, first_name: str, first: Tensor, name: str, tensor: Tensor) -> None:
    """Checks that two tensors have the same dtype and device."""
    check(
        tensor.dtype == first.dtype,
        f"{op}: {name} is {dtype_name(tensor.dtype)}, {first_name} is {dtype_name(first.dtype)}; "
        "they must have one dtype",
    )
    check(tensor.device == first.device, f"{op}: {name} and {first_name} must be on one device")


def check_same_shape(op: str, first_name: str, first: Tensor, name: str, tensor: Tensor) -> None:
    """Checks that two tensors have the same shape."""
    message = f"{op}: {name} has shape {shape_of(tensor)}, {first_name} has shape {shape_of(first)}; they must be equal"
    check(tensor.dim() == first.dim(), message)
    for size, expected in zip(tensor.shape, first.shape):
        check(size == expected, message)
