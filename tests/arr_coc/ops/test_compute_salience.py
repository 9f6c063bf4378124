"""compute_salience against a walk over patches and neighbours, and its rules for edges of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.arr_coc.ops import compute_salience, compute_salience_forward, compute_salience_grad


def by_hand(features, lab, gx, gy, patch, weights):
    """One sample, patch by patch, in float64."""
    rows, columns = lab.shape[1] // patch, lab.shape[2] // patch
    cells = [
        (slice(i * patch, (i + 1) * patch), slice(j * patch, (j + 1) * patch))
        for i in range(rows)
        for j in range(columns)
    ]
    colours = [np.array([lab[c][cell].mean() for c in range(3)]) for cell in cells]
    mean = features.mean(0)
    salience = []
    for n, cell in enumerate(cells):
        m = np.sqrt(gx[0][cell] ** 2 + gy[0][cell] ** 2 + 1e-8).mean()
        around = [
            np.linalg.norm(colours[n] - colours[k])
            for k in range(len(cells))
            if k != n and abs(k // columns - n // columns) <= 1 and abs(k % columns - n % columns) <= 1
        ]
        d = np.mean(around) if around else 0
        cosine = features[n] @ mean / max(np.linalg.norm(features[n]), 1e-12) / max(np.linalg.norm(mean), 1e-12)
        salience.append(np.array([m / (m + 0.1), d / (d + 25), (1 - cosine) / 2]) @ weights / sum(weights))
    return np.array(salience)


def gradients(grad, features, lab, gx, gy, patch, weights, *needs):
    """Of features, lab, gx and gy, those that are needed."""
    statistics = compute_salience_forward(features, lab, gx, gy, patch, weights)[1:]
    return compute_salience_grad(grad, features, gx, gy, *statistics, patch, weights, *needs)


def near_the_exact_gradients(given, patch):
    call = (patch, (0.5, 0.25, 0.25), True, True, True, True)
    for single, double in zip(gradients(*given, *call), gradients(*(t.double().cpu() for t in given), *call)):
        torch.testing.assert_close(single.double().cpu(), double, rtol=1e-3, atol=1e-6)


sizes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 7), st.integers(1, 20))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), sizes, st.tuples(*[st.floats(0.125, 4)] * 3))
def test_is_what_a_walk_over_the_patches_finds(seed, sizes, weights):
    batch, rows, columns, patch, width = sizes
    rng, size = np.random.default_rng(seed), (rows * patch, columns * patch)
    features, lab = rng.normal(size=(batch, rows * columns, width)), rng.normal(size=(batch, 3, *size)) * 30
    gx, gy = rng.normal(size=(2, batch, 1, *size)) * 0.1
    arrays = (features, lab, gx, gy)
    actual = compute_salience(*(torch.from_numpy(a) for a in arrays), patch, weights).numpy()
    for b in range(batch):
        expected = by_hand(*(a[b] for a in arrays), patch, np.array(weights))
        np.testing.assert_allclose(actual[b], expected, atol=1e-12)


def test_the_gradient_keeps_no_image_of_colours_and_leaves_the_answer_as_it_is(device):
    features, lab, gx, gy = (
        torch.rand(size, device=device, requires_grad=True)
        for size in [(2, 6, 9), (2, 3, 8, 12), (2, 1, 8, 12), (2, 1, 8, 12)]
    )
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        salience = compute_salience(features, lab, gx, gy, 4)
    assert sorted(kept) == sorted([(2, 6, 9), (2, 1, 8, 12), (2, 1, 8, 12), (2, 9), (2, 1), (2, 7, 6)])
    with torch.no_grad():
        assert torch.equal(compute_salience(features, lab, gx, gy, 4), salience)


def flat_image(device, batch=1, rows=2, columns=3, patch=4, width=5):
    features = torch.ones(batch, rows * columns, width, device=device)
    lab = torch.full((batch, 3, rows * patch, columns * patch), 40.0, device=device)
    flat = torch.zeros(batch, 1, rows * patch, columns * patch, device=device)
    return features, lab, flat, flat.clone(), patch


def test_nothing_stands_out_of_a_flat_image_and_its_gradients_are_finite(device):
    *inputs, patch = flat_image(device)
    inputs = [t.requires_grad_() for t in inputs]
    salience = compute_salience(*inputs, patch)
    assert salience.abs().max() < 1e-3
    of_features, of_lab, of_x, of_y = torch.autograd.grad(salience.sum(), inputs)
    assert of_features.abs().max() < 1e-6
    assert of_lab.eq(0).all()  # a distance of 0 turns around here; its gradient is chosen as 0
    assert of_x.eq(0).all()
    assert of_y.eq(0).all()


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_each_term_finds_its_odd_patch(weights, device):
    features, lab, gx, gy, patch = flat_image(device, rows=4, columns=5)
    features[:, 7] = torch.tensor([1.0, -1, 1, -1, 1], device=device)
    lab[:, :, 4:8, 8:12] = 80
    gy[:, :, 4:8, 8:12] = 0.2
    assert compute_salience(features, lab, gx, gy, patch, weights).argmax(1).tolist() == [7]


def test_zero_features_are_half_salient_and_never_nan(device):
    features, *others = flat_image(device)
    assert compute_salience(features * 0, *others, (0.0, 0.0, 1.0)).eq(0.5).all()


@pytest.mark.parametrize("patch", [1, 31, 32, 33, 40, 70])
def test_patches_of_any_size(patch, device):
    """From 33 pixels a side on, CUDA gives a patch a whole block."""
    features, lab, gx, gy = (
        torch.rand(s, device=device)
        for s in [(2, 6, 9), (2, 3, 2 * patch, 3 * patch)] + [(2, 1, 2 * patch, 3 * patch)] * 2
    )
    lab = lab * 90
    actual = compute_salience(features, lab, gx, gy, patch).cpu()
    arrays = [t.double().cpu().numpy() for t in (features, lab, gx, gy)]
    for b in range(2):
        expected = by_hand(*(a[b] for a in arrays), patch, np.array([0.5, 0.25, 0.25]))
        np.testing.assert_allclose(actual[b], expected, atol=1e-5)
    near_the_exact_gradients((torch.rand(2, 6, device=device), features, lab, gx, gy), patch)


@pytest.mark.parametrize(("patch", "columns"), [(2, 700), (4, 400), (8, 170)])
def test_rows_of_pixels_that_are_longer_than_a_block_of_threads(patch, columns, device):
    size = (2 * patch, columns * patch)
    shapes = [(2, 2 * columns), (2, 2 * columns, 3), (2, 3, *size), (2, 1, *size), (2, 1, *size)]
    near_the_exact_gradients([torch.randn(shape, device=device) for shape in shapes], patch)
