"""add_out where memory is shared, has gaps, or is laid out unlike its inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from exportkit.arr_coc import ops

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t[:4, :6, :10].contiguous(),
    "shifted by one element": lambda t: t.flatten()[1:241].view(4, 6, 10),
    "with gaps": lambda t: t[1:5, 1:13:2, 1:21:2],
    "reversed dimensions": lambda t: t[:10, :6, :4].permute(2, 1, 0),
    "one row in two": lambda t: t[:8:2, :6, :10],
    "a column": lambda t: t[:4, :6, 3:4].expand(4, 6, 10),
}


@pytest.mark.parametrize("out_view", [name for name in VIEWS if name != "a column"])
@pytest.mark.parametrize("b_view", VIEWS)
@pytest.mark.parametrize("a_view", VIEWS)
def test_every_layout_of_every_argument(a_view: str, b_view: str, out_view: str, device: torch.device):
    a, b = (VIEWS[name](torch.randn(16, 16, 24, device=device)) for name in (a_view, b_view))
    storage = torch.full((16, 16, 24), 7.0, device=device)
    out, expected = VIEWS[out_view](storage), a + b
    if out_view == "contiguous":
        storage = out
    strides = out.stride()
    assert ops.add_out(a, b, out) is None
    assert out.stride() == strides
    assert torch.equal(out, expected)
    assert (storage == 7).sum() == storage.numel() - out.numel(), "wrote outside of out"


def test_out_may_be_an_input(device: torch.device):
    a, b = torch.randn(5, 1001, device=device), torch.randn(5, 1001, device=device)
    expected = a + b
    ops.add_out(a, b, a)
    assert torch.equal(a, expected)
    ops.add_out(a, a, a)
    assert torch.equal(a, expected + expected)


@pytest.mark.parametrize("shift", [1, 4, 500])
def test_inputs_that_overlap_out_are_read_first(shift: int, device: torch.device):
    size = 100_000
    for ahead in (True, False):
        storage = torch.randn(size + shift, device=device)
        a, out = (storage[shift:], storage[:-shift]) if ahead else (storage[:-shift], storage[shift:])
        b = torch.randn(size, device=device)
        expected = a + b
        ops.add_out(a, b, out)
        assert torch.equal(out, expected)


def test_out_transposed_onto_its_input(device: torch.device):
    a, b = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    expected = a + b
    ops.add_out(a, b, a.T)
    assert torch.equal(a.T, expected)


def test_a_gradient_is_refused_and_not_lost(device: torch.device):
    a, b = torch.randn(3, device=device, requires_grad=True), torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        ops.add_out(a, b, torch.empty_like(b))
    with torch.no_grad():
        ops.add_out(a, b, out := torch.empty_like(b))
    assert torch.equal(out, a.detach() + b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_number_is_read_and_every_sum_rounded_to_even(dtype: torch.dtype, device: torch.device):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    for other in (torch.zeros_like(every), every.flip(0), every[torch.randperm(2**16, device=device)]):
        for start in (0, 1):  # whole vectors, and a remainder
            a, b = every[start:], other[start:]
            out = torch.empty_like(a)
            ops.add_out(a, b, out)
            expected = (a.float() + b.float()).to(dtype)
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    tiny = torch.full((9,), torch.finfo(dtype).tiny, dtype=dtype, device=device)
    ops.add_out(tiny, -tiny / 2, out := torch.empty_like(tiny))
    assert (out == tiny / 2).all(), "denormals are kept"
