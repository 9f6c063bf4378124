"""invariant_linear: a row's bits depend on the row, the weight and the bias alone; sums have the documented order."""

from __future__ import annotations

from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exportkit.arr_coc.ops.invariant_linear import invariant_linear
from exportkit.operators.contract.layout import FLOATING

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]
# Few rows, one small tile and more, large tiles; sums of one part, of two with a short last step, of the most parts.
ROWS = [1, 2, 4, 5, 31, 48, 49, 64, 65, 100, 784, 4096]
PRODUCTS = [1, 15, 16, 300, 384, 600, 777, 1536, 3072, 5000]


def _call(device: torch.device, dtype: torch.dtype, rows: int, products: int, width: int) -> tuple[Tensor, ...]:
    x, weight, bias = (torch.randn(*shape) for shape in ((rows, products), (width, products), (width,)))
    return tuple(tensor.to(dtype).to(device) for tensor in (x, weight, bias))


def _assert_rows_alone_and_together(x: Tensor, weight: Tensor, bias: Tensor, parts: list[slice]) -> None:
    together = invariant_linear(x, weight, bias)
    for part in parts:
        assert torch.equal(invariant_linear(x[part].clone(), weight, bias), together[part])


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@given(data=st.data())
def test_a_row_has_the_same_bits_beside_any_rows(device: torch.device, dtype: torch.dtype, data: st.DataObject):
    rows, products = data.draw(st.integers(1, 150)), data.draw(st.sampled_from(PRODUCTS[:-2]) | st.integers(0, 900))
    width = data.draw(st.integers(1, 140))
    first = data.draw(st.integers(0, rows - 1))
    part = slice(first, data.draw(st.integers(first + 1, rows)))
    _assert_rows_alone_and_together(*_call(device, dtype, rows, products, width), [part])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("width", [3, 64, 384, 1152])
def test_every_way_of_the_gpu_has_the_same_bits(dtype: torch.dtype, products: int, width: int):
    """The ways: warps for few rows, small tiles by one block or by a cluster, large tiles."""
    call = _call(torch.device("cuda"), dtype, max(ROWS), products, width)
    _assert_rows_alone_and_together(*call, [slice(7, 7 + rows) for rows in ROWS[:-1]])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("products", PRODUCTS)
def test_cpu_and_gpu_have_the_same_bits(dtype: torch.dtype, rows: int, products: int):
    call = _call(torch.device("cpu"), dtype, rows, products, 66)
    on_gpu = invariant_linear(*(tensor.cuda() for tensor in call))
    assert torch.equal(on_gpu.cpu(), invariant_linear(*call))


def _rounded(value: Fraction) -> Fraction:
    """The nearest float32, ties to even; for values whose exponent float32 has."""
    if value == 0:
        return value
    unit = Fraction(2) ** (_exponent(value) - 23)
    return round(value / unit) * unit


def _exponent(value: Fraction) -> int:
    """The e with 2^e <= |value| < 2^(e + 1)."""
    e = abs(value.numerator).bit_length() - value.denominator.bit_length()
    return e if abs(value) >= Fraction(2) ** e else e - 1


@pytest.mark.parametrize(("products", "lengths"), [(40, [40]), (511, [511]), (521, [272, 249]), (800, [272, 272, 256])])
def test_sums_are_in_the_documented_order(products: int, lengths: list[int]):
    """Exact fractions, rounded after each step, are the oracle."""
    x, weight, bias = _call(torch.device("cpu"), torch.float32, 2, products, 3)
    found = invariant_linear(x, weight, bias).numpy()
    for (r, c), number in numpy.ndenumerate(found):
        pairs = [(Fraction(float(a)), Fraction(float(b))) for a, b in zip(x[r], weight[c])]
        total, begin = Fraction(0), 0
        for length in lengths:
            part = Fraction(0)
            for a, b in pairs[begin : begin + length]:
                part = _rounded(a * b + part)
            total, begin = _rounded(total + part), begin + length
        assert float(number) == float(_rounded(total + Fraction(float(bias[c]))))


def test_half_types_are_rounded_once():
    x, weight, bias = _call(torch.device("cpu"), torch.bfloat16, 30, 700, 20)
    assert torch.equal(
        invariant_linear(x, weight, bias), invariant_linear(x.float(), weight.float(), bias.float()).bfloat16()
    )


def test_cascade_sums_are_as_accurate_as_torchs():
    x, weight, bias = _call(torch.device("cpu"), torch.float32, 50, 6000, 20)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    errors = [
        (found.double() - exact).square().mean().sqrt()
        for found in (invariant_linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    ]
    assert errors[0] < 4 * errors[1]
