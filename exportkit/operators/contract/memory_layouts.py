"""The same values in other memory: as functions, and as the code that does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_FRAME = 64


@dataclass(frozen=True)
class MemoryLayout:
    """A way to lay out a tensor: its values in new memory, or the tensor itself where the layout changes nothing.

    `code` is the code of the result, from the code of the tensor and the tensor.
    """

    name: str
    apply: Callable[[Tensor], Tensor]
    code: Callable[[str, Tensor], str]


def _spaced(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    for dim in range(tensor.dim()):
        tensor = tensor.repeat_interleave(2, dim)
    return tensor[tuple(slice(1, None, 2) for _ in tensor.shape)]


def _spaced_code(code: str, tensor: Tensor) -> str:
    if tensor.dim() == 0:
        return code
    repeated = "".join(f".repeat_interleave(2, {dim})" for dim in range(tensor.dim()))
    return f"{code}{repeated}[{', '.join(['1::2'] * tensor.dim())}]"


def _reversed(tensor: Tensor) -> Tensor:
    order = tuple(range(tensor.dim()))[::-1]
    turned = tensor.permute(order)
    # A tensor of one dimension, or of one row, lies so already, and contiguous() gives its own memory.
    return tensor if turned.is_contiguous() else turned.contiguous().permute(order)


def _reversed_code(code: str, tensor: Tensor) -> str:
    order = tuple(range(tensor.dim()))[::-1]
    return code if tensor.dim() < 2 else f"{code}.permute({order}).contiguous().permute({order})"


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _channels_last_code(code: str, tensor: Tensor) -> str:
    return f"{code}.contiguous(memory_format=torch.channels_last)" if tensor.dim() == 4 else code


def _expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor) if tensor.dim() and tensor.shape[0] > 1 else tensor


def _expanded_code(code: str, tensor: Tensor) -> str:
    return f"{code}[:1].expand({tuple(tensor.shape)})" if tensor.dim() and tensor.shape[0] > 1 else code


def framed(tensor: Tensor, value: float = 1) -> Tensor:
    """Returns the values with others before and after them; integers, which may point somewhere, have 0 or 1 there."""
    flat = tensor.contiguous().flatten()
    value = value if tensor.is_floating_point() else value <= 1
    return pad(flat, (_FRAME, _FRAME), value=value)[_FRAME : _FRAME + flat.numel()].view(tensor.shape)


def _framed_code(code: str, tensor: Tensor) -> str:
    size = math.prod(tensor.shape)
    framed = f"torch.nn.functional.pad({code}.flatten(), ({_FRAME}, {_FRAME}), value=1)"
    return f"{framed}[{_FRAME}:{_FRAME + size}].view({tuple(tensor.shape)})"


def _unaligned(before: int) -> MemoryLayout:
    """Contiguous memory that begins so many elements after an aligned address."""

    def apply(tensor: Tensor) -> Tensor:
        return pad(tensor.contiguous().flatten(), (before, 0), value=1)[before:].view(tensor.shape)

    def code(code: str, tensor: Tensor) -> str:
        padded = f"torch.nn.functional.pad({code}.flatten(), ({before}, 0), value=1)"
        return f"{padded}[{before}:].view({tuple(tensor.shape)})"

    elements = "one element" if before == 1 else f"{before} elements"
    return MemoryLayout(f"memory that begins {elements} after an aligned address", apply, code)


PLAIN = MemoryLayout("as it is", lambda t: t, lambda code, _: code)
SPACED = MemoryLayout("gaps between elements", _spaced, _spaced_code)
EXPANDED = MemoryLayout("stride 0 in the first dimension", _expanded, _expanded_code)
FRAMED = MemoryLayout("other elements before and after", framed, _framed_code)
UNALIGNED = tuple(_unaligned(before) for before in range(1, 16))
REVERSED = MemoryLayout("the first dimension innermost", _reversed, _reversed_code)
CHANNELS_LAST = MemoryLayout("the channels innermost", _channels_last, _channels_last_code)

STRIDED = (SPACED, REVERSED, CHANNELS_LAST, EXPANDED, FRAMED, UNALIGNED[0])
"""Each layout in which memory is not what a kernel may expect."""
