"""reduce_sum: one tree whatever the strides and the neighbours, and its accuracy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import reduce_sum

SIZES = [1, 2, 7, 8, 16, 24, 31, 32, 33, 63, 64, 65, 128, 200, 255, 256, 264, 512, 1000, 1024, 1025]
SIZES += [1032, 4096, 4100, 8192, 8200, 20000]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.data())
def test_is_the_sum_over_any_dimension_of_any_shape_in_any_order_of_dimensions(shape: list[int], data: st.DataObject):
    x = torch.randn(shape, dtype=torch.float64).permute(data.draw(st.permutations(range(len(shape)))))
    dim = data.draw(st.integers(-x.dim(), x.dim() - 1))
    actual = reduce_sum(x, dim)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, x.sum(dim), rtol=1e-12, atol=1e-12)
    assert torch.equal(actual, reduce_sum(x.contiguous(), dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_along_and_across_memory_the_bits_are_the_same(size: int, dtype: torch.dtype, device: torch.device):
    x = torch.randn(48, size, device=device).to(dtype)
    along = reduce_sum(x, 1)
    across = x.mT.contiguous()
    assert torch.equal(reduce_sum(across, 0), along)
    assert torch.equal(reduce_sum(across[:, 1:4].contiguous(), 0), along[1:4])
    assert torch.equal(reduce_sum(across[:, 5], 0), along[5])
    assert torch.equal(reduce_sum(x[5].clone(), 0), along[5])
    spread = torch.empty(48, size, 3, device=device, dtype=dtype)[..., 1].copy_(x)
    assert torch.equal(reduce_sum(spread, 1), along)
    for columns in (6, 16):
        pages = x.view(-1, columns, size).mT.contiguous()
        assert torch.equal(reduce_sum(pages, 1).flatten(), along)


@pytest.mark.parametrize("size", [1000, 100_000, 3_000_000])
def test_many_equal_numbers_lose_nothing(size: int, device: torch.device):
    """Added one by one in float32, 0.1 would be off by percents."""
    x = torch.full((size,), 0.1, device=device)
    torch.testing.assert_close(reduce_sum(x, 0).double(), x.double().sum(), rtol=1e-6, atol=0)


def test_half_types_are_summed_in_float32(device: torch.device):
    x = torch.ones(2, 5000, device=device, dtype=torch.float16)
    assert reduce_sum(x, 1).tolist() == [5000, 5000]
    assert reduce_sum(x * 0.25, 1).tolist() == [1250, 1250]
    bits = torch.ones(4096, device=device, dtype=torch.bfloat16)
    assert reduce_sum(bits, 0) == 4096


@pytest.mark.parametrize("shape", [(1024, 768), (3, 100, 300), (9000, 200), (40, 1000)], ids=str)
def test_the_number_of_threads_shows_in_no_bit(shape: tuple[int, ...]):
    x = torch.randn(shape)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7, 64):
            torch.set_num_threads(threads)
            results.append([reduce_sum(x, dim) for dim in range(x.dim())])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    for dim, total in enumerate(results[0]):
        torch.testing.assert_close(total, x.double().sum(dim).float(), rtol=1e-4, atol=1e-4)
