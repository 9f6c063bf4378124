"""muladd against float64."""

from __future__ import annotations

import pytest
import torch

from exportkit.arr_coc.ops import muladd


@pytest.mark.parametrize("size", [1, 7, 8, 1023, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_is_a_times_b_plus_c_rounded_once(size, dtype, device):
    a, b = (torch.randint(-64, 65, (size,), device=device).to(dtype) / 8 for _ in range(2))
    assert torch.equal(muladd(a, b, 0.25), (a.double() * b.double() + 0.25).to(dtype))  # exact before it is rounded
