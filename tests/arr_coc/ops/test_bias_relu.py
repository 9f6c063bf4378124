"""relu, bias_relu and scale_bias_relu against torch's own operators: NaN, rounding, what is kept for the gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import bias_relu, relu, scale_bias_relu, scale_bias_relu_grad

HALVES = [torch.float16, torch.bfloat16]
shapes = st.tuples(st.integers(0, 5), st.integers(0, 70), st.integers(1, 70))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), shapes, st.sampled_from([torch.float32, torch.float64, *HALVES]))
def test_is_relu_of_the_sum_to_the_bit(seed, shape, dtype):
    torch.manual_seed(seed)
    x, bias = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    x[torch.rand(shape) < 0.1] = torch.nan
    wide = x if dtype == torch.float64 else x.float()
    torch.testing.assert_close(bias_relu(x, bias), torch.relu(wide + bias).to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(relu(x), torch.relu(x), rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), shapes)
def test_gradients_are_those_of_relu_of_the_scaled_sum(seed, shape):
    torch.manual_seed(seed)
    x, bias = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    scale, inputs = float(torch.randn(())), (x.requires_grad_(), bias.requires_grad_())
    upstream = torch.randn(shape, dtype=torch.float64)
    expected = torch.autograd.grad(torch.relu(x * scale + bias), inputs, upstream)
    actual = torch.autograd.grad(scale_bias_relu(x, bias, scale), inputs, upstream)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [1, 3, 8, 197, 256, 1000, 4096])
@pytest.mark.parametrize("rows", [1, 31, 33, 700, 5000])
@pytest.mark.parametrize("need_x", [True, False])
def test_gradient_of_the_bias_is_the_sum_over_the_rows_that_pass(rows, width, need_x, device):
    output, grad = torch.relu(torch.randn(rows, width, device=device)), torch.randn(rows, width, device=device)
    of_x, of_bias = scale_bias_relu_grad(grad, output, 0.5, need_x, True)
    passed = torch.where(output > 0, grad, 0)
    torch.testing.assert_close(of_bias, passed.double().sum(0).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(of_x, passed * 0.5) if need_x else of_x.shape == (0,)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_types_are_rounded_once(dtype, device):
    x = torch.randn(64, 129, device=device).to(dtype)
    bias = torch.randn(129, device=device).to(dtype)
    exact = torch.relu(x.double() * 0.3125 + bias.double())  # exact in float64, and to a bit beyond in float32
    assert torch.equal(scale_bias_relu(x, bias, 0.3125), exact.float().to(dtype))


def test_a_product_beyond_float16_is_brought_back_by_the_bias(device):
    x = torch.full((3, 5), 300.0, device=device, dtype=torch.float16)
    bias = torch.full((5,), -60000.0, device=device, dtype=torch.float16)
    assert scale_bias_relu(x, bias, 300.0).eq(30000).all()
    assert scale_bias_relu(x, bias * 0, 300.0).isposinf().all()


def test_nan_passes_its_gradient_as_in_torch(device):
    x = torch.tensor([torch.nan, -1.0, 2.0, -torch.inf, torch.inf], device=device, requires_grad=True)
    for function in (relu, torch.relu, lambda x: bias_relu(x, torch.zeros_like(x))):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert gradient.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("function", [relu, lambda x: bias_relu(x, x[0]), lambda x: scale_bias_relu(x, x[0], 2.0)])
def test_only_the_output_is_kept_for_the_gradient(function, device):
    x, kept = torch.randn(4, 8, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = function(x)
    own = [t for t in kept if t.shape == x.shape and t.data_ptr() != x.data_ptr()]
    assert [t.data_ptr() for t in own] == [output.data_ptr()]
    assert all(t.data_ptr() != x.data_ptr() for t in kept)
