"""softmax against torch's own: every length at which another kernel takes over, infinities, NaN and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import softmax, softmax_grad

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LENGTHS = [1, 2, 15, 16, 17, 64, 197, 511, 512, 513, 520, 4095, 4096, 4104, 16383, 16384, 16385, 16392, 100003, 131072]
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 300), st.sampled_from([1, 10, 1000]))
def test_equals_torch_with_infinities_and_nan_anywhere(seed, rows, width, spread):
    torch.manual_seed(seed)
    x = torch.randn(rows, width) * spread
    for special in (-torch.inf, -torch.inf, torch.inf, torch.nan):
        x[torch.rand(rows, width) < 1 / (3 * width)] = special
    x[torch.rand(rows) < 0.1] = -torch.inf
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("width", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_length(width, dtype, device):
    x, grad = (torch.randn(3, width, device=device).mul(3).to(dtype) for _ in range(2))
    exact = torch.softmax(x.double(), -1)
    output = softmax(x)
    rtol = max(EPSILON[dtype], 1e-14) * (1 if dtype in (torch.float16, torch.bfloat16) else 16)
    torch.testing.assert_close(output.double(), exact, rtol=rtol, atol=1e-7 if dtype == torch.float16 else 0)
    y, g = output.double(), grad.double()
    expected = y * (g - (g * y).sum(-1, keepdim=True))
    torch.testing.assert_close(softmax_grad(grad, output).double(), expected, rtol=2 * rtol, atol=4 * EPSILON[dtype])


@pytest.mark.parametrize("width", [4, 33, 600, 5000, 20001, 40000])
def test_rows_with_infinities_and_huge_logits_are_those_of_torch(width, device):
    x = torch.randn(8, width, device=device)
    x[0] = -torch.inf
    x[1, : width - 1] = -torch.inf  # all but one thread see nothing else
    x[2, width // 2] = torch.inf
    x[3, width // 2] = torch.nan
    x[4, : width // 2] = -torch.inf
    x[5] = torch.finfo(torch.float32).min
    for row, size in ((6, 60000.0), (7, 3e38)):  # whose differences overflow
        x[row] = -size
        x[row, ::7] = size
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-7, equal_nan=True)
