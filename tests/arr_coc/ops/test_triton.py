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


def test_rows_of_symbolic_length_export(device: torch.device):
    """A kernel that walks a row, since what holds one is compiled for its length."""

    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return triton.softmax(x), *triton.rms_norm_quantize(x, weight)

    def inputs(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(3, columns, device=device), torch.rand(columns, device=device) + 0.5

    columns = torch.export.Dim("columns", min=2, max=40_000)
    program = torch.export.export(Rows(), inputs(50), dynamic_shapes=({1: columns}, {0: columns}))
    for size in (2, 5000, 40_000):
        arguments = inputs(size)
        softmax, quantized, scale = program.module()(*arguments)
        expected, expected_scale = triton.SPECS["rms_norm_quantize"].reference(*arguments)
        torch.testing.assert_close(softmax, torch.softmax(arguments[0], -1), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
        assert (quantized.int() - expected.int()).abs().max() <= 1


def test_quantized_rows_are_within_half_a_step(device: torch.device):
    x, weight = torch.randn(64, 1000, device=device), torch.randn(1000, device=device)
    assert_is_the_norm(x, weight, triton.rms_norm_quantize)


@pytest.mark.cuda
def test_triton_computes_on_cuda():
    assert importlib.util.find_spec("triton") is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        triton.softmax(torch.randn(4, 100, device="cuda"))
        torch.cuda.synchronize()
    assert any("softmax_rows" in event.key for event in profile.key_averages())
