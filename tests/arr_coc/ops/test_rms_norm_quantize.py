"""rms_norm_quantize against torch.nn.functional.rms_norm, and what it promises of the step and of rows without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import rms_norm_quantize

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def assert_is_the_norm(x: torch.Tensor, weight: torch.Tensor, operator: Any = rms_norm_quantize) -> None:
    """Every entry within half a step of the norm, the largest at 127 exactly, the step the largest / 127."""
    quantized, scale = operator(x, weight)
    y = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], weight.double(), 1e-6)
    torch.testing.assert_close(scale.double(), y.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert quantized.abs().amax(-1).eq(127).all()
    off = (quantized * scale.double().unsqueeze(-1) - y).abs()
    assert (off <= scale.double().unsqueeze(-1) * (0.5 + 1e-4)).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 300), st.sampled_from(DTYPES), st.floats(-3, 3))
def test_no_entry_is_off_by_more_than_half_a_step(seed, rows, width, dtype, exponent):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, width, generator=generator) * 10**exponent).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    weight[weight == 0] = 1
    x[x == 0] = 1
    assert_is_the_norm(x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 64, 256, 257, 1024, 1032, 4096, 8192, 16384, 16392, 40000])
def test_rows_of_every_length(width: int, dtype: torch.dtype, device: torch.device):
    assert_is_the_norm(torch.randn(9, width, device=device).to(dtype), torch.randn(width, device=device).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 33, 1024, 5000, 40000])
def test_rows_without_a_step_are_zeros_and_leave_the_others_alone(width: int, dtype: torch.dtype, device: torch.device):
    x, weight = torch.randn(6, width, device=device).to(dtype), torch.ones(width, device=device).to(dtype)
    clean = rms_norm_quantize(x, weight)
    x[1] = 0
    x[2, width // 2] = torch.nan
    x[3, -1] = torch.inf
    x[4, 0] = -torch.inf
    quantized, scale = rms_norm_quantize(x, weight)
    assert quantized[1:5].eq(0).all()
    assert scale[1] == 0
    assert scale[2:5].isnan().all()
    for actual, expected in zip((quantized, scale), clean):
        assert torch.equal(actual[[0, 5]], expected[[0, 5]])


def test_numbers_too_small_for_a_step_are_zeros(device: torch.device):
    x, weight = torch.full((1, 8), 1e-38, device=device), torch.full((8,), 1e-3, device=device)
    quantized, scale = rms_norm_quantize(x, weight)
    assert quantized.eq(0).all()
    assert scale == 0
