"""top_k_patches against independent oracles, and where it meets the rest of torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc import ops


def best_first(scores: list[float], k: int) -> list[int]:
    """The definition, in Python: NaN last, then higher scores first, then lower indices first."""
    is_nan = [score != score for score in scores]
    return sorted(range(len(scores)), key=lambda i: (is_nan[i], 0 if is_nan[i] else -scores[i], i))[:k]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_order_is_the_definition(data: st.DataObject):
    number = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(width=32))
    scores = data.draw(st.lists(number, min_size=1, max_size=40))
    k = data.draw(st.integers(0, len(scores)))
    _, indices = ops.top_k_patches(torch.tensor([scores]), torch.zeros(1, len(scores), 1), k)
    assert indices[0].tolist() == best_first(scores, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_value_ranks_as_its_float_value(dtype: torch.dtype, device: torch.device):
    """All 65536 patterns at once, which is also more than one block sorts."""
    patterns = torch.randperm(1 << 16, device=device).to(torch.int32)
    scores = (patterns - (1 << 15)).to(torch.int16).view(dtype).reshape(1, -1)
    features = torch.arange(1 << 16, device=device, dtype=torch.float32).reshape(1, -1, 1)
    selected, indices = ops.top_k_patches(scores, features, 1 << 16)
    _, expected = ops.top_k_patches(scores.double(), features, 1 << 16)
    assert torch.equal(indices, expected)
    assert torch.equal(selected[0, :, 0].long(), indices[0])


@pytest.mark.parametrize("width", [16385, 66049])
def test_rows_so_wide_that_they_are_copied_in_parts_are_copied_to_their_end(width: int, device: torch.device):
    features = torch.rand(2, 5, width, device=device, requires_grad=True)
    selected, indices = ops.top_k_patches(torch.rand(2, 5, device=device), features, 3)
    assert torch.equal(selected, features.take_along_dim(indices[..., None], 1))
    (grad,) = torch.autograd.grad(selected.sum(), features)
    assert grad.sum().item() == 2 * 3 * width


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 1000, 1024, 1025, 2048, 2049, 4097, 9000, 20000])
def test_many_ties_at_every_size(dtype: torch.dtype, k: int, device: torch.device):
    scores = torch.randint(0, 50, (3, 20000), device=device).to(dtype)
    features = torch.rand(3, 20000, 1, device=device)
    _, indices = ops.top_k_patches(scores, features, k)
    assert torch.equal(indices, torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 200, 2048, 2049])
def test_samples_so_large_that_blocks_share_them(dtype: torch.dtype, k: int, device: torch.device):
    scores = torch.rand(2, 300_001, device=device).to(dtype)
    scores[1, 1000:] = scores[1, :1].clone()  # nearly all of a sample equal
    features = torch.arange(300_001, device=device, dtype=torch.float32).expand(2, -1)[..., None]
    selected, indices = ops.top_k_patches(scores, features, k)
    assert torch.equal(indices, torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k])
    assert torch.equal(selected[..., 0].long(), indices)


@pytest.mark.parametrize("spread", [1e-7, 1.0, 1e30])
def test_scores_that_share_their_leading_bits(spread: float, device: torch.device):
    """Digits that do not separate the keys must not end the search early."""
    scores = 0.75 + torch.rand(2, 3000, device=device, dtype=torch.float64) * spread
    _, indices = ops.top_k_patches(scores, torch.rand(2, 3000, 1, device=device), 700)
    assert torch.equal(indices, torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :700])


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 15, 16, 64, 1023, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_rows_of_every_width_and_alignment(width: int, dtype: torch.dtype, device: torch.device):
    padded = torch.randn(2, 9, width + 3, device=device, dtype=dtype)
    scores = torch.rand(2, 9, device=device)
    by_columns = padded.transpose(1, 2).contiguous().transpose(1, 2)
    for features in (padded[..., :width].contiguous(), padded[..., 1 : width + 1], by_columns):
        selected, indices = ops.top_k_patches(scores, features, 5)
        where = indices.unsqueeze(-1).expand(-1, -1, features.shape[2])
        assert torch.equal(selected, features.gather(1, where))


def test_scores_and_features_may_have_different_dtypes(device: torch.device):
    scores, features = torch.rand(2, 9, device=device), torch.randn(2, 9, 4, device=device, dtype=torch.bfloat16)
    selected, indices = ops.top_k_patches(scores.double(), features, 3)
    expected, expected_indices = ops.SPECS["top_k_patches"].reference(scores, features, 3)
    assert selected.dtype == torch.bfloat16
    assert torch.equal(selected, expected)
    assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("batch", "patches", "width", "k"),
    [
        *((2, 9, 1, 5), (3, 1000, 1, 1000), (2, 40, 7, 13), (5, 33, 12, 1), (2, 50, 5000, 7), (1, 64, 1030, 64)),
        *((1, 300, 8, 0), (2, 20_000, 3, 19_999), (1, 300_000, 1, 500)),
    ],
)
def test_the_gradient_writes_every_row(
    batch: int, patches: int, width: int, k: int, dtype: torch.dtype, device: torch.device
):
    grad = torch.randn(batch, k, width + 1, device=device, dtype=dtype)[..., 1:]
    indices = torch.rand(batch, patches, device=device).argsort(-1)[:, :k]
    where = indices[..., None].expand(-1, -1, width)
    expected = torch.zeros(batch, patches, width, device=device, dtype=dtype).scatter(1, where, grad)
    assert torch.equal(ops.top_k_patches_grad(grad, indices, patches), expected)
    assert torch.equal(ops.top_k_patches_grad(grad.contiguous(), indices, patches), expected)


def test_the_gradient_refuses_an_index_out_of_range():
    with pytest.raises(RuntimeError, match=r"indices must be in \[0, 4\), got 4"):
        ops.top_k_patches_grad(torch.rand(1, 2, 3), torch.tensor([[0, 4]]), 4)
    with pytest.raises(RuntimeError, match=r"indices must be in \[0, 4\), got -1"):
        ops.top_k_patches_grad(torch.rand(1, 2, 3), torch.tensor([[-1, 0]]), 4)
