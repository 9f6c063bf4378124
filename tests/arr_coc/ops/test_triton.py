"""The operators `arr_coc_triton::*` beyond their contract."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from exportkit.arr_coc.ops import triton
from tests.arr_coc.ops.test_rms_norm_quantize import assert_is_the_norm


@pytest.mark.parametrize("columns", [1, 2, 100, 128, 1000, 16384, 16385, 70_000])
def test_softmax_is_torchs(columns: int, device: torch.device):
    x = torch.randn(3, columns, device=device, requires_grad=True)
    grad = torch.randn(3, columns, device=device)
    torch.testing.assert_close(triton.softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-7)
    actual, expected = (torch.autograd.grad(f, x, grad)[0] for f in (triton.softmax(x), torch.softmax(x, -1)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("columns", [2, 1000, 5000, 40_000])
def test_quantized_rows_are_within_half_a_step(columns: int, device: torch.device):
    x, weight = torch.randn(64, columns, device=device), torch.randn(columns, device=device)
    assert_is_the_norm(x, weight, triton.rms_norm_quantize)


@pytest.mark.cuda
def test_triton_computes_on_cuda():
    assert importlib.util.find_spec("triton") is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        triton.softmax(torch.randn(4, 100, device="cuda"))
        torch.cuda.synchronize()
    assert any("softmax_rows" in event.key for event in profile.key_averages())
