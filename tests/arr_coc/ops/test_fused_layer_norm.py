"""fused_layer_norm against torch.nn.functional.layer_norm, far from 0, for rows of every length, and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import fused_layer_norm, fused_layer_norm_grad

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WIDTHS = [7, 64, 256, 257, 640, 768, 1024, 1032, 3072, 4096, 8192, 12288, 12296, 16384, 16392, 40000]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def of_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Layer norm in float64."""
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), eps)


def assert_near(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Off by `tolerance` of the largest value at most."""
    assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-30)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 300), st.floats(-3, 4), st.floats(-2, 2))
def test_neither_offset_nor_scale_costs_digits(seed, rows, width, offset, scale):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 10**scale + 10**offset
    weight, bias = torch.randn(width, generator=generator), torch.randn(width, generator=generator)
    assert_near(fused_layer_norm(x, weight, bias), of_torch(x, weight, bias), 2e-6)


@pytest.mark.parametrize("width", [8, 33, 768, 5000, 40000])
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
def test_a_mean_far_from_zero_does_not_ruin_the_variance(offset: float, width: int, device: torch.device):
    x = torch.randn(3, width, device=device) + offset
    one, zero = torch.ones(width, device=device), torch.zeros(width, device=device)
    assert_near(fused_layer_norm(x, one, zero), of_torch(x, one, zero), 2e-6)
    _, mean, rstd = torch.ops.arr_coc.fused_layer_norm(x, one, zero)
    torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=2e-7, atol=0)
    torch.testing.assert_close(rstd.double(), (x.double().var(-1, correction=0) + 1e-5).rsqrt(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("place", [0, 1, 31, 32, 500, -1])
def test_one_huge_value_anywhere_in_a_row_leaves_the_others_their_digits(place: int, device: torch.device):
    x = torch.randn(3, 1024, device=device)
    x[:, place] = 1e4
    one, zero = torch.ones(1024, device=device), torch.zeros(1024, device=device)
    others = torch.arange(1024, device=device) != place % 1024
    error = fused_layer_norm(x, one, zero).double() - of_torch(x, one, zero)
    assert error[:, others].abs().max() <= 1e-5  # of a standard deviation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_length_forward_and_backward(width: int, dtype: torch.dtype, device: torch.device):
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in ((3, 7, width), width, width)]
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    y, exact = fused_layer_norm(*inputs), of_torch(*exact_inputs)
    assert_near(y, exact, TOLERANCE[dtype])
    upstream = torch.randn(3, 7, width, device=device).to(dtype)
    gradients = torch.autograd.grad(y, inputs, upstream)
    for a, e in zip(gradients, torch.autograd.grad(exact, exact_inputs, upstream.double())):
        scale = max(1.0, float(e.abs().max()))
        assert (a.double() - e).abs().max() <= 8 * TOLERANCE[dtype] * scale


def test_gradients_of_the_parameters_add_up_many_rows(device: torch.device):
    x, grad = torch.randn(2, 30011, 24, device=device)
    weight = torch.randn(24, device=device)
    _, mean, rstd = torch.ops.arr_coc.fused_layer_norm(x, weight, weight)
    _, of_weight, of_bias = fused_layer_norm_grad(grad, x, weight, mean, rstd, False, True, True)
    z = (x.double() - mean.double().unsqueeze(-1)) * rstd.double().unsqueeze(-1)
    assert_near(of_weight, (grad.double() * z).sum(0), 2e-6)
    assert_near(of_bias, grad.double().sum(0), 2e-6)
    both = fused_layer_norm_grad(grad, x, weight, mean, rstd, True, True, True)
    assert_near(both[1], (grad.double() * z).sum(0), 2e-6)
    assert_near(both[2], grad.double().sum(0), 2e-6)


@pytest.mark.parametrize("width", [16, 65, 1032, 40000])
def test_a_rows_gradient_does_not_depend_on_the_other_rows(width: int, device: torch.device):
    x, grad = torch.randn(2, 9, width, device=device)
    weight = torch.randn(width, device=device)
    _, mean, rstd = torch.ops.arr_coc.fused_layer_norm(x, weight, weight)
    together, _, _ = fused_layer_norm_grad(grad, x, weight, mean, rstd, True, True, True)
    for row in range(9):
        one = slice(row, row + 1)
        alone, _, _ = fused_layer_norm_grad(grad[one], x[one], weight, mean[one], rstd[one], True, True, True)
        assert torch.equal(alone[0], together[row])


def test_a_vector_is_one_row(device: torch.device):
    x, weight, bias = torch.randn(3, 40, device=device)
    assert torch.equal(fused_layer_norm(x, weight, bias), fused_layer_norm(x.view(1, 40), weight, bias)[0])


def test_the_statistics_have_no_gradient(device: torch.device):
    x, weight = torch.randn(2, 8, device=device, requires_grad=True), torch.ones(8, device=device)
    y, mean, rstd = torch.ops.arr_coc.fused_layer_norm(x, weight, weight)
    assert [t.requires_grad for t in (y, mean, rstd)] == [True, False, False]
