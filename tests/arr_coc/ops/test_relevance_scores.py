"""relevance_scores against the operators it is composed of, and what it promises beyond them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import compute_entropy, compute_salience, opponent_balance, query_alignment, relevance_scores


def arguments(device, dtype=torch.float64, batch=2, rows=3, columns=4, width=8, tokens=0):
    """Features, query, colours, edges, weights."""

    def normal(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    query = normal(batch, tokens, width) if tokens else normal(batch, width)
    colours, edges = normal(batch, 3, rows, columns) * 20, normal(batch, 1, rows, columns).abs()
    return normal(batch, rows * columns, width), query, colours, edges, torch.rand(batch, 3, device=device).to(dtype)


def near_the_exact_scores(given, atol, *rest, **options):
    """The scores, which are those of float64 within this bound."""
    actual = relevance_scores(*given, *rest, **options)
    exact = relevance_scores(*(t.double() for t in given), *rest, **options)
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=atol)
    return actual


sizes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 40), st.integers(0, 5))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    sizes,
    st.tuples(*[st.floats(0.125, 4)] * 3),
    st.floats(0.1, 5),
    st.booleans(),
    st.booleans(),
)
def test_is_the_composition(seed, sizes, salience_weights, temperature, invert, masked):
    """A patch of one pixel has its colour and its gradient magnitude as means."""
    torch.manual_seed(seed)
    features, query, colours, edges, weights = arguments("cpu", torch.float64, *sizes)
    edges = edges + 1e-3
    mask = torch.rand(query.shape[:2]) < 0.5 if masked and query.dim() == 3 else None
    sobel_x = (edges**2 - 1e-8).sqrt()
    salience = compute_salience(features, colours, sobel_x, sobel_x * 0, 1, salience_weights)
    entropy, alignment = compute_entropy(features, temperature), query_alignment(features, query, mask)
    expected = opponent_balance(entropy, salience, alignment, weights, invert)
    actual = relevance_scores(features, query, colours, edges, weights, mask, salience_weights, temperature, invert)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("salience_weights", [(0.5, 0.5, 0.0), (0.5, 0.25, 0.25)])
@pytest.mark.parametrize(("batch", "rows", "columns", "width"), [(3, 64, 64, 256), (2, 41, 50, 96), (70, 14, 14, 64)])
def test_sizes_of_which_one_sample_is_many_blocks(batch, rows, columns, width, salience_weights, device):
    given = arguments(device, torch.float32, batch, rows, columns, width)
    actual = near_the_exact_scores(given, 1e-5, None, salience_weights)
    assert torch.equal(relevance_scores(*given, None, salience_weights), actual)
    alone = relevance_scores(*(t[1:2] for t in given), None, salience_weights)
    assert torch.equal(alone[0], actual[1])


# On a GPU with clusters, rows of whole slices of 256 bytes are read once, in samples of up to 4096 of them. A block has
# one group of rows or several, the last of which is smaller, and one team of warps or two.
ONE_READ = [(1, 1, 128), (1, 5, 128), (14, 14, 384), (28, 28, 384), (32, 32, 256), (41, 50, 128), (64, 64, 128)]
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "columns", "width"), ONE_READ)
def test_a_sample_has_the_same_bits_alone_and_among_many(rows, columns, width, dtype, device):
    given = arguments(device, dtype, 3, rows, columns, width)
    given[0].add_(torch.randn(width, device=device).to(dtype))  # otherwise the mean is almost zero
    actual = near_the_exact_scores(given, ROUNDING[dtype])
    assert torch.equal(relevance_scores(*(t[2:] for t in given))[0], actual[2])
    many = relevance_scores(*(t.repeat(20, *[1] * (t.dim() - 1)) for t in given))  # more than run at a time
    assert torch.equal(many, actual.repeat(20, 1))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_far_from_zero_and_infinite_elements(dtype, device):
    """Powers of two of these elements are beyond float's range, or are not numbers once multiplied."""
    given = arguments(device, dtype, 4, 28, 28, 384)
    features = given[0]
    features[0, 3] *= 1000
    features[0, 5] += 300
    features[0, 6] -= 300
    features[0, 7, :128] += 300
    features[1, 8, 9] = 80
    features[2, 10] = 0
    features[3, 11, 12] = -math.inf  # its mean is infinite, too
    actual = relevance_scores(*given)
    exact = relevance_scores(*(t.double() for t in given))
    torch.testing.assert_close(actual.double()[:3], exact[:3], rtol=0, atol=ROUNDING[dtype])
    assert torch.equal(actual.isnan(), exact.isnan())
    assert exact[3].isnan().all()


def test_a_token_that_is_masked_counts_nothing_even_if_it_is_not_a_number(device):
    features, query, colours, edges, weights = arguments(device, torch.float32, 3, 28, 28, 384, 1)
    mask = torch.tensor([[True], [False], [True]], device=device)
    query[1] = math.nan
    actual = near_the_exact_scores((features, query, colours, edges, weights), 1e-5, mask)
    assert not actual.isnan().any()


@pytest.mark.parametrize("salience_weights", [(0.5, 0.5, 0.0), (0.5, 0.25, 0.25)])
@pytest.mark.parametrize("width", [5888, 6144, 9000, 12288])
def test_a_query_that_just_fits_shared_memory_or_does_not(width, salience_weights, device):
    """Vectors of 48 KiB, less than what else a block keeps there, need what more than 48 KiB needs."""
    near_the_exact_scores(arguments(device, torch.float32, 2, 2, 3, width), 1e-5, None, salience_weights)


@pytest.mark.parametrize(("magnitude", "temperature"), [(1e10, 1.0), (1.0, 1e-10), (1e3, 1e-8)])
@pytest.mark.parametrize("width", [8, 33, 128, 2056])
def test_features_far_larger_than_the_temperature(width, magnitude, temperature, device):
    """The rounding of features over a temperature is then past any exponent."""
    given = arguments(device, torch.float32, width=width)
    given[0].mul_(magnitude)
    given[0][0, 1, :3] = given[0][0, 1].max() * 2  # not one largest element, but three
    near_the_exact_scores(given, 1e-5, temperature=temperature)
    features = given[0].requires_grad_()
    entropy = compute_entropy(features, temperature)
    torch.testing.assert_close(entropy.double(), compute_entropy(features.double(), temperature), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(entropy.sum(), features)
    assert gradient.isfinite().all()
