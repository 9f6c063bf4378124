"""Computes small convolutions on a CPU as matrix products (docs/adr/0051).

For a small convolution, oneDNN needs longer to prepare than to compute: it orders the weights anew in every call,
because AOTInductor hands them over as they are.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from exportkit.export.compile.inductor_changes import taken_apart

MOST_PRODUCTS = 1 << 21  # multiplications of a sample: more of them pay for oneDNN's preparations
MOST_COPIED = 1 << 16  # elements of a sample's windows: they stay in a core's cache
MANY_CHANNELS = 8  # side by side, fill a register
LEAST_RUN = 4  # elements of a window that lie side by side: shorter runs are copied one by one
MOST_TAPS = 25  # of a depthwise filter: each is an addition in the code


def small_convolutions() -> AbstractContextManager[None]:
    """Lets Inductor write small convolutions as products while the block runs."""
    return taken_apart(torch.ops.aten.convolution.default, decomposed)


def decomposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Computes aten.convolution in another way if it is small; NotImplemented leaves it as it is.

    The channels lie side by side, so that whole runs of them are copied. The result is contiguous, as a convolution's
    is: where the next operation allows it, Inductor does not make that copy.
    """
    if transposed or not is_small(x, weight, stride, padding, dilation, groups):
        return NotImplemented
    dims = x.dim() - 2
    stride, padding, dilation = (list(each) * (dims // len(each)) for each in (stride, padding, dilation))
    moved = x.permute(0, *range(2, dims + 2), 1)  # [batch, *size, channels]
    if any(padding):
        moved = torch.nn.functional.pad(moved, [0, 0, *(each for each in reversed(padding) for _ in range(2))])
    compute = _product if groups == 1 else _depthwise
    answer = compute(moved, weight, stride, dilation)
    if bias is not None:
        answer = answer + bias
    return answer.permute(0, dims + 1, *range(1, dims + 1)).contiguous()


def is_small(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """Tells whether a convolution is one that `decomposed` computes faster. Only the batch may be dynamic."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if x.dim() != weight.dim() or not all(isinstance(size, int) for size in (*x.shape[1:], *weight.shape)):
        return False
    outputs, channels, *kernel = weight.shape
    dims = len(kernel)
    steps, pads, holes = (list(each) * (dims // len(each)) for each in (stride, padding, dilation))
    positions = math.prod(_positions([size + 2 * pad for size, pad in zip(x.shape[2:], pads)], kernel, steps, holes))
    window = channels * math.prod(kernel)
    if positions < 1 or positions * window * outputs > MOST_PRODUCTS:
        return False
    if groups != 1:
        return channels == 1 and outputs == groups >= 8 and window <= MOST_TAPS
    run = channels * (kernel[-1] if channels < MANY_CHANNELS and holes[-1] == 1 else 1)
    return positions * window <= MOST_COPIED and run >= min(LEAST_RUN, window)


def _positions(size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Returns how many positions a filter has along each axis."""
    each_axis = zip(size, kernel, stride, dilation)
    return [(length - hole * (taps - 1) - 1) // step + 1 for length, taps, step, hole in each_axis]


def _product(moved: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Multiplies each window with all filters. Both have the channels last. The weights' new order is a constant."""
    outputs, channels, *kernel = weight.shape
    dims, batch = len(kernel), moved.shape[0]
    positions = _positions(moved.shape[1:], kernel, stride, dilation)
    length = channels * math.prod(kernel)
    if any(size != 1 for size in (*kernel, *stride)):
        moved = _windows(moved, kernel, positions, stride, dilation)
    filters = weight.permute(*range(2, dims + 2), 1, 0).reshape(length, outputs)
    return torch.mm(moved.reshape(batch * math.prod(positions), length), filters).view(batch, *positions, outputs)


def _windows(
    moved: Tensor, kernel: Sequence[int], positions: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Returns the windows [batch, *positions, *kernel, channels] of a tensor [batch, *size, channels]."""
    dims = len(kernel)
    if moved.shape[-1] >= MANY_CHANNELS:
        for axis, (taps, step, hole) in enumerate(zip(kernel, stride, dilation), start=1):
            moved = moved.unfold(axis, hole * (taps - 1) + 1, step)[..., ::hole]
        return moved.permute(*range(dims + 1), *range(dims + 2, 2 * dims + 2), dims + 1)
    # Inductor stores what as_strided reads. Otherwise it would decide for each element whether it is padding.
    moved = moved.contiguous()
    batch, *steps, one = moved.stride()
    return moved.as_strided(
        (moved.shape[0], *positions, *kernel, moved.shape[-1]),
        (batch, *map(operator.mul, steps, stride), *map(operator.mul, steps, dilation), one),
    )


def _depthwise(moved: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Adds up the products of each tap, for all channels at once."""
    outputs, _, *kernel = weight.shape
    filters = weight.permute(*range(2, weight.dim()), 1, 0).reshape(-1, outputs).contiguous()
    total: Tensor | None = None
    for taken, filter_ in zip(itertools.product(*map(range, kernel)), filters):
        tap = moved
        for axis, (at, taps, step, hole) in enumerate(zip(taken, kernel, stride, dilation), start=1):
            last = moved.shape[axis] - hole * (taps - 1) + at * hole
            tap = tap.narrow(axis, at * hole, last - at * hole)[(slice(None),) * axis + (slice(None, None, step),)]
        total = tap * filter_ if total is None else total + tap * filter_
    assert total is not None
    return total
