"""A linear layer that gives a row the same bits beside any other rows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, normals, operator_like
from exportkit.arr_coc.ops._reference import accumulated


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows x @ weight.T + bias, where a row's bits depend on that row, the weight and the bias alone.

    A matrix library chooses how to add up a product by the number of rows; here the order depends on I alone: I is cut
    into parts of at least 256 products, at most 8 of them. A part is added up from its first product to its last, with
    one fused multiply-add each, and then the parts are added in order. CPU and GPU do the same.

    Half types are multiplied and added in float32 (float64 in float64), and rounded once, after the bias.

    Args:
        x: Rows.
        weight: One row for each number of the result.
        bias: What is added to each row.
    """
    product = accumulated(x) @ accumulated(weight).t()
    return (product if bias is None else product + accumulated(bias)).to(x.dtype)


invariant_linear = operator_like(invariant_linear_reference)


def _rows(tensor: Tensor) -> Tensor:
    """[..., D] as [rows, D]."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _gradient(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes the gradients by torch's products, as `torch.nn.functional.linear` does."""
    rows = _rows(grad)
    with torch.autocast(grad.device.type, enabled=False):  # a gradient has its argument's dtype
        of_x = grad @ weight if need_x else None
        of_weight = rows.t() @ _rows(x) if need_weight else None
    return of_x, of_weight, rows.sum(0) if need_bias else None


register_gradient("invariant_linear", _gradient)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    normal = normals(device, dtype)

    def call(rows: tuple[int, ...], products: int, width: int, *, bias: bool = True) -> Sample:
        label = f"x {[*rows, products]}, weight {[width, products]}{', bias' if bias else ''}"
        return Sample(
            label, (normal(*rows, products), normal(width, products) / max(products, 1) ** 0.5, *[normal(width)] * bias)
        )

    yield call((2, 5), 8, 3)
    yield call((1, 3), 7, 5, bias=False)
    yield call((), 9, 4)
    for rows in [(0,), (2, 0), (5,)]:
        yield call(rows, 6, 4)
    yield call((2, 3), 0, 4)
    yield call((2, 3), 4, 0)
    yield call((70,), 0, 4)
    # On a GPU few rows, small tiles and large ones; sums of one part, of parts that end within a step, of most parts.
    for count, products, width in [(1, 300, 33), (5, 1111, 9), (49, 17, 70), (70, 520, 65), (60, 4100, 68)]:
        yield call((count,), products, width)
    yield call((1500,), 20, 1100)
    special = normal(3, 4).index_fill(0, torch.tensor([1], device=device), torch.nan)
    yield Sample("NaN in a row", (special, normal(5, 4), normal(5)))
    yield Sample(
        "infinity in the weight",
        (normal(3, 4), normal(5, 4).index_fill(0, torch.tensor([2], device=device), torch.inf)),
    )


SPEC = ArrCocSpec(
    wrapper=invariant_linear,
    reference=invariant_linear_reference,
    layout=Layout(inputs={"x": "... I", "weight": "O I", "bias": "O"}, outputs=["... O"]),
    samples=_samples,
    differentiable=("x", "weight", "bias"),
    tolerances={torch.float32: (1e-4, 2e-4)},  # of sums of thousands of normal numbers, which may cancel
    second_order=True,
)
