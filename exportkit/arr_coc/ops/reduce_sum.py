"""Sums over one dimension in an order that depends on that dimension's size alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, check, normals, operator_like
from exportkit.arr_coc.ops._reference import accumulated


def reduce_sum_reference(x: Tensor, dim: int) -> Tensor:
    """The sum over one dimension, added up in a tree that depends on that dimension's size alone.

    So a sum has the same bits on every run, for all strides and sizes of the other dimensions. Half types are added in
    float32. An empty sum is 0.

    Args:
        x: At least one dimension.
        dim: The dimension; a negative one counts from the end.

    Returns:
        `x` without that dimension.
    """
    return accumulated(x).sum(dim).to(x.dtype)


reduce_sum = operator_like(reduce_sum_reference)


def _check_dim(op: str, x: Tensor, dim: int) -> None:
    rank = x.dim()
    check(rank >= 1, f"{op}: x must have at least one dimension, got shape []")
    out_of_range = f"{op}: dim must be in [{-rank}, {rank - 1}], got {dim}"
    check(dim >= -rank, out_of_range)
    check(dim < rank, out_of_range)


def _sum_of(x: Tensor, dim: int) -> Tensor:
    dim %= x.dim()
    return x.new_empty((*x.shape[:dim], *x.shape[dim + 1 :]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.shape = x.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.unsqueeze(ctx.dim).expand(ctx.shape), None


torch.library.register_autograd("arr_coc::reduce_sum", _backward, setup_context=_setup_context)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    normal = normals(device, dtype)
    shapes = [((2, 3, 8), 1), ((5, 33), 1), ((1, 1), -1), ((0, 4), 1), ((4, 0), 1), ((2, 5, 3), -3), ((9,), 0)]
    # Around the sizes that a thread, a warp, a block and one launch sum.
    shapes += [((2, size), 1) for size in (31, 32, 33, 64, 100, 1000, 1024, 1032, 4097, 9000)]
    shapes += [((3, size, 16), 1) for size in (8, 32, 33, 100, 1024, 1025, 9000)]
    shapes += [((2, 70, 3), 1), ((70, 2, 130), 0), ((3, 4, 5, 6), 2), ((2, 1, 3), 1)]
    for shape, dim in shapes:
        yield Sample(f"x {list(shape)}, dim {dim}", (normal(*shape), dim))
    for value in (torch.nan, torch.inf):
        spoilt = normal(5, 40, 3)
        spoilt[2, 17, 1] = value
        yield Sample(f"{value}", (spoilt, 1))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x = torch.randn(2, 3, device=device)
    yield Refusal("rank 0", (x[0, 0], 0), r"x must have at least one dimension, got shape \[\]")
    yield Refusal("dim 2", (x, 2), r"dim must be in \[-2, 1\], got 2")
    yield Refusal("dim -3", (x, -3), r"dim must be in \[-2, 1\], got -3")


SPEC = ArrCocSpec(
    wrapper=reduce_sum,
    reference=reduce_sum_reference,
    layout=Layout(inputs={"x": "..."}, outputs=_sum_of, further=_check_dim),
    samples=_samples,
    more_refusals=_refusals,
    differentiable=("x",),
    second_order=True,
    autocast="float32",
    # A sum of 9000 numbers of both signs may be near zero. One after the other, as ONNX Runtime adds them, is off by up
    # to 6e-4; our tree and torch's by 8e-5.
    tolerances={torch.float32: (1e-4, 1e-3)},
)
