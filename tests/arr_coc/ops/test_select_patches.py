"""select_patches returns the bits of the operators that it replaces. It refuses impossible grids, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exportkit.arr_coc.ops import SPECS, allocate_lod_tokens, select_patches, top_k_patches
from exportkit.arr_coc.ops.select_patches import centres
from tests.drawn import examples

FLOATING = SPECS["select_patches"].dtypes


def separately(scores: Tensor, features: Tensor, k: int, rows: int, columns: int, *budgets: Any) -> tuple[Tensor, ...]:
    """The composition. ATen's division by a number is exact on the CPU alone; on CUDA it multiplies by the inverse."""
    kept, indices = top_k_patches(scores, features, k)
    chosen = scores.gather(1, indices)
    positions = centres(indices.cpu(), rows, columns).to(scores.device)
    return kept * chosen.unsqueeze(-1), indices, allocate_lod_tokens(chosen, *budgets), chosen, positions


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """NaN equals NaN, but -0 is not +0."""
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        numbers = ~theirs.isnan()
        assert torch.equal(ours.signbit()[numbers], theirs.signbit()[numbers])


def strided(features: Tensor, how: str) -> Tensor:
    """The same features in another layout of memory."""
    batch, patches, width = features.shape
    if how == "by columns":
        return features.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "patches first":
        return features.transpose(0, 1).contiguous().transpose(0, 1)
    room = features.new_empty(batch, patches, width + 3)
    first = 1 if how == "padded, unaligned" else 0
    return room[..., first : first + width].copy_(features)


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, torch.nan, torch.inf, -torch.inf]), st.floats(width=16), st.floats(0, 1)
)


@settings(max_examples=examples(200))
@given(st.data())
def test_is_the_composition_bit_for_bit(data: st.DataObject):
    batch, rows, columns = (data.draw(st.integers(1, most)) for most in (3, 5, 5))
    width = data.draw(st.sampled_from([0, 1, 3, 5, 8, 33, 65]))
    dtype, how = data.draw(st.sampled_from(FLOATING)), data.draw(st.sampled_from(["by columns", "padded, unaligned"]))
    patches = rows * columns
    k = data.draw(st.integers(0, patches))
    drawn = data.draw(st.lists(numbers, min_size=batch * patches, max_size=batch * patches))
    scores = torch.tensor(drawn, dtype=torch.float64).reshape(batch, patches).to(dtype)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    features = strided(torch.randn(batch, patches, width).to(dtype), how)
    least, most = sorted(data.draw(st.tuples(st.integers(0, 90), st.integers(0, 90))))
    gamma = data.draw(st.sampled_from([1.0, 2.0, 2.2, 0.5]))
    total = data.draw(st.one_of(st.none(), st.integers(k * least, k * most)))
    arguments = scores, features, k, rows, columns, least, most, gamma, total
    assert_same_bits(select_patches(*arguments), separately(*arguments))


@pytest.mark.parametrize("how", ["by columns", "patches first", "padded", "padded, unaligned"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 15, 16, 64, 264, 1023, 5000])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_rows_of_every_width_and_alignment(width: int, dtype: torch.dtype, how: str, device: torch.device):
    scores = torch.randn(2, 12, device=device).to(dtype)
    features = torch.randn(2, 12, width, device=device).to(dtype)
    expected = separately(scores, features, 7, 3, 4)
    assert_same_bits(select_patches(scores, features, 7, 3, 4), expected)
    assert_same_bits(select_patches(scores, strided(features, how), 7, 3, 4), expected)


# The sizes at which another kernel selects, and which more than one block handles.
@pytest.mark.parametrize("total", [None, 7])
@pytest.mark.parametrize(
    ("batch", "rows", "columns", "width", "k"),
    [
        *((1, 28, 28, 384, 200), (3, 64, 64, 24, 200), (2, 64, 64, 3, 4096), (1, 41, 50, 5, 2049), (2, 91, 90, 8, 64)),
        *((1, 128, 128, 8, 2048), (2, 128, 129, 8, 2048), (2, 128, 129, 8, 2049), (1, 1, 60_000, 1, 200)),
        *((70, 14, 14, 8, 50), (2, 14, 14, 8, 0), (2, 3, 4, 70_000, 5)),
    ],
)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_samples_of_every_size(
    batch: int, rows: int, columns: int, width: int, k: int, total: int | None, dtype: torch.dtype, device: torch.device
):
    scores = torch.randn(batch, rows * columns, device=device).to(dtype)
    features = torch.randn(1, rows * columns, width, device=device).to(dtype).expand(batch, -1, -1)
    budgets = (0, 9, 1.5, None if total is None else k * total)
    arguments = scores, features, k, rows, columns, *budgets
    assert_same_bits(select_patches(*arguments), separately(*arguments))


def test_a_grid_of_more_patches_than_int64_counts_is_refused(device: torch.device):
    rows, columns = 7047956753329, 2617318  # 2^64 + 6 patches, which wrap around to 6
    scores, features = torch.rand(1, 6, device=device), torch.rand(1, 6, 2, device=device)
    with pytest.raises(RuntimeError, match="relevance_scores has N = 6, the grid of patches has N = "):
        select_patches(scores, features, 2, rows, columns)
