"""muladd against float64. Its call skips autograd rules where gradients are off, as that of every operator."""

from __future__ import annotations

import pytest
import torch

from exportkit.arr_coc.ops import SPECS, muladd


@pytest.mark.parametrize("size", [1, 7, 8, 1023, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_is_a_times_b_plus_c_rounded_once(size, dtype, device):
    a, b = (torch.randint(-64, 65, (size,), device=device).to(dtype) / 8 for _ in range(2))
    assert torch.equal(muladd(a, b, 0.25), (a.double() * b.double() + 0.25).to(dtype))  # exact before it is rounded


def test_gradients_come_back_after_a_call_without():
    a = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert not muladd(a, a, 1.0).requires_grad
    muladd(a, a, 1.0).sum().backward()
    torch.testing.assert_close(a.grad, 2 * a.detach())


def test_autocast_holds_where_gradients_are_off():
    a = torch.randn(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert muladd(a.bfloat16(), a, 1.0).dtype == torch.float32
        assert SPECS["muladd"].autocast == "widest"
