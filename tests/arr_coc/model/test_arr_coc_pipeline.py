"""What the ARR-COC model promises of its outputs, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exportkit.arr_coc.model import build
from exportkit.errors import InputError, UsageError
from tests.arr_coc.model.model_cases import ALL, FILTERS, FILTERS_14, VIT, VIT_14, answer, inputs, shallow

NAMES = ["features", "indices", "budgets", "scores", "positions", "relevance"]
CONFIGS = [pytest.param(kwargs, id=name) for name, kwargs in ALL.items()]


@pytest.mark.slow_but("*-filters", "1-4-4-vit")
@pytest.mark.parametrize("kwargs", CONFIGS)
@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 4, 4), (2, 5, 9), (5, 7, 4), (1, 13, 17)])
def test_outputs_have_the_promised_names_shapes_and_dtypes(kwargs: dict[str, Any], batch: int, rows: int, columns: int):
    model = build(**kwargs)
    outputs = answer(model, *inputs(model, batch, rows, columns))
    count = rows * columns
    k = min(200, count)
    assert list(outputs) == NAMES
    assert {name: tuple(tensor.shape) for name, tensor in outputs.items()} == {
        "features": (batch, k, model.encoder.dim),
        "indices": (batch, k),
        "budgets": (batch, k),
        "scores": (batch, k),
        "positions": (batch, k, 2),
        "relevance": (batch, count),
    }
    integers = {"indices", "budgets"}
    assert all(tensor.dtype == (torch.int64 if n in integers else torch.float32) for n, tensor in outputs.items())
    assert all(tensor.isfinite().all() for tensor in outputs.values())


def test_patches_come_in_order_of_relevance_and_none_twice():
    model = build(k=60)
    outputs = answer(model, *inputs(model, 3, 9, 13))
    best = outputs["relevance"].sort(dim=1, descending=True, stable=True)
    assert torch.equal(outputs["indices"], best.indices[:, :60])
    assert torch.equal(outputs["scores"], best.values[:, :60])


def test_budgets_follow_the_score_and_stay_in_their_limits():
    model = build(k=50, min_tokens=10, max_tokens=90, gamma=2.0)
    outputs = answer(model, *inputs(model, 2, 8, 9))
    expected = 10 + torch.floor(80 * outputs["scores"].double() ** 2 + 0.5).long()
    assert torch.equal(outputs["budgets"], expected)


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (15, 17)])
def test_mean_tokens_makes_the_sum_exact_for_any_number_of_patches(rows: int, columns: int):
    model = build(mean_tokens=123)
    budgets = answer(model, *inputs(model, 2, rows, columns))["budgets"]
    assert (budgets.sum(1) == 123 * min(200, rows * columns)).all()
    assert budgets.min() >= 64
    assert budgets.max() <= 400


def test_positions_are_the_centres_of_the_patches():
    model = build(k=200)
    outputs = answer(model, *inputs(model, 1, 3, 5))
    for index, (y, x) in zip(outputs["indices"][0].tolist(), outputs["positions"][0].tolist()):
        assert y == pytest.approx((index // 5 + 0.5) / 3)
        assert x == pytest.approx((index % 5 + 0.5) / 5)


def test_scaled_features_are_the_encoders_times_the_score_or_the_encoders():
    scaled, straight = build(k=9, gating="scale"), build(k=9, gating="straight-through")
    image, query = inputs(scaled, 2, 5, 6)
    with torch.no_grad():
        features = scaled.encode(image)
    outputs = answer(scaled, image, query)
    rows = features.gather(1, outputs["indices"].unsqueeze(-1).expand(-1, -1, features.shape[2]))
    assert torch.equal(outputs["features"], rows * outputs["scores"].unsqueeze(-1))
    assert torch.equal(answer(straight, image, query)["features"], rows)


# --- batches ----------------------------------------------------------------------------------------------------------


def _assert_the_same_bits_in_any_batch(kwargs: dict[str, Any], rows: int, columns: int) -> None:
    model = build(**kwargs)
    image, query = inputs(model, 5, rows, columns)
    together = answer(model, image, query)
    for size in (1, 2, 3):
        for start in (0, 5 - size):
            part = answer(model, image[start : start + size].clone(), query[start : start + size].clone())
            for name, tensor in part.items():
                assert torch.equal(tensor, together[name][start : start + size]), (name, size, start)


@pytest.mark.parametrize("kwargs", [FILTERS, FILTERS_14], ids=["patch 16", "patch 14, learned balancer"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (3, 3), (4, 4), (5, 9), (15, 14), (37, 41)])
def test_a_sample_gets_the_same_bits_alone_and_in_any_batch(kwargs: dict[str, Any], rows: int, columns: int):
    _assert_the_same_bits_in_any_batch(kwargs, rows, columns)


RELU = {"activation": "relu", "attention": "explicit"}


@pytest.mark.slow_but("4-4-*")
@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize(("options", "threads"), [({}, 1), (RELU, 2), (RELU, 3)], ids=["GELU", "ReLU, 2", "ReLU, 3"])
@pytest.mark.parametrize("kwargs", [VIT, VIT_14], ids=["patch 16", "patch 14"])
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (5, 9), (15, 14)])
def test_so_does_a_sample_of_a_transformer(
    kwargs: dict[str, Any], rows: int, columns: int, options: dict[str, Any], threads: int
):
    """ATen cuts an elementwise function into as many pieces as there are threads, wherever that falls.

    Its vectorised exponential and error function end in a scalar one with other last bits, so with some numbers of
    threads SDPA's softmax and GELU know the size of the batch. ReLU and explicit attention do not, nor fixed filters.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _assert_the_same_bits_in_any_batch({**kwargs, **options}, rows, columns)
    finally:
        torch.set_num_threads(before)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("encoder", ["filters", "vit-small", "vit-base"])
def test_on_a_gpu_a_sample_has_the_same_bits_alone_and_in_batches_of_8_and_64(encoder: str, dtype: torch.dtype):
    """At sizes where a matrix library has several kernels to choose from."""
    model = shallow(build(encoder=encoder), blocks=2).to("cuda", dtype)
    few = inputs(model, 4, 28, 28)
    image, query = (t.to("cuda", dtype).repeat(16, *[1] * (t.dim() - 1)) for t in few)
    together = answer(model, image, query)
    for size, start in [(1, 0), (1, 63), (8, 0), (8, 56)]:
        part = slice(start, start + size)
        for name, tensor in answer(model, image[part].clone(), query[part].clone()).items():
            assert torch.equal(tensor, together[name][part]), (name, size, start)


@pytest.mark.parametrize("kwargs", CONFIGS)
def test_what_a_batch_mate_holds_does_not_matter_not_even_nan(kwargs: dict[str, Any]):
    model = build(**kwargs)
    image, query = inputs(model, 3, 5, 6)
    expected = answer(model, image, query)
    image[1], query[1] = torch.nan, torch.nan
    spoilt = answer(model, image, query)
    for name in NAMES:
        assert torch.equal(spoilt[name][0], expected[name][0])
        assert torch.equal(spoilt[name][2], expected[name][2])


# --- queries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", CONFIGS)
def test_one_token_is_the_same_query_as_a_vector(kwargs: dict[str, Any]):
    model = build(**kwargs)
    image, query = inputs(model, 2, 4, 5)
    expected, outputs = answer(model, image, query), answer(model, image, query.unsqueeze(1))
    assert all(torch.equal(outputs[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("kwargs", CONFIGS)
def test_a_masked_token_does_not_show_whatever_it_holds(kwargs: dict[str, Any]):
    model = build(**kwargs)
    image, query = inputs(model, 2, 4, 5, tokens=4)
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    expected = answer(model, image, query, mask)
    spoilt = answer(model, image, query.masked_fill(~mask.unsqueeze(-1), torch.nan), mask)
    assert all(torch.equal(spoilt[name], expected[name]) for name in NAMES)
    shorter = answer(model, image[:1], query[:1, :2])
    torch.testing.assert_close(shorter["relevance"], expected["relevance"][:1])


def test_a_query_without_any_token_falls_back_to_what_is_informative_and_salient():
    model = build(balancer="learned")
    image, query = inputs(model, 1, 4, 5, tokens=2)
    outputs = answer(model, image, query, torch.zeros(1, 2, dtype=torch.bool))
    assert all(tensor.isfinite().all() for tensor in outputs.values())


# --- layouts and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", CONFIGS)
def test_the_layout_of_the_inputs_does_not_matter(kwargs: dict[str, Any]):
    model = build(**kwargs)
    image, query = inputs(model, 2, 5, 6)
    expected = answer(model, image, query)
    sliced = torch.stack([query, query], dim=-1)[..., 0]
    outputs = answer(model, image.to(memory_format=torch.channels_last), sliced)
    torch.testing.assert_close(outputs["relevance"], expected["relevance"])


@pytest.mark.slow_but("*-filters", "torch.bfloat16-0.04-vit")
@pytest.mark.parametrize("kwargs", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)], ids=str
)
def test_other_dtypes_give_the_relevance_float32_gives(kwargs: dict[str, Any], dtype: torch.dtype, atol: float):
    model = build(**kwargs)
    image, query = inputs(model, 2, 6, 7)
    expected = answer(model, image, query)["relevance"]
    outputs = answer(model.to(dtype), image.to(dtype), query.to(dtype))
    assert {outputs[name].dtype for name in ("features", "scores", "relevance")} == {dtype}
    assert outputs["positions"].dtype == torch.float32
    torch.testing.assert_close(outputs["relevance"].float(), expected, atol=atol, rtol=0)


# --- refused ----------------------------------------------------------------------------------------------------------


IMAGE, QUERY, TOKENS, MASK = torch.rand(2, 3, 64, 80), torch.zeros(2, 64), torch.zeros(2, 3, 64), torch.ones(2, 3) > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((IMAGE[:, :, :63], QUERY), "height must be a positive multiple of the patch size 16, got 63"),
        ((IMAGE[..., :79], QUERY), "width must be a positive multiple of the patch size 16, got 79"),
        ((IMAGE[:, :, :0], QUERY), "height must be a positive multiple of the patch size 16, got 0"),
        ((IMAGE[0], QUERY), r"image must be \[B, 3, H, W\], got shape \[3, 64, 80\]"),
        ((IMAGE[:, :1], QUERY), r"image must be \[B, 3, H, W\], got shape \[2, 1, 64, 80\]"),
        (((IMAGE * 255).byte(), QUERY), "image must be floating, .* got torch.uint8; divide bytes by 255"),
        ((IMAGE, QUERY[0]), r"query must be \[B, Dq\] or \[B, T, Dq\], got shape \[64\]"),
        ((IMAGE, QUERY[:, :63]), r"query must have width 64, got shape \[2, 63\]"),
        ((IMAGE, QUERY[:1]), "query is for 1 samples, image has 2"),
        ((IMAGE, QUERY.double()), "query is torch.float64, image is torch.float32"),
        ((IMAGE, QUERY, MASK), r"query must be \[B, T, Dq\], got shape \[2, 64\]"),
        ((IMAGE, TOKENS, MASK.float()), "mask must be bool, True for tokens that count, got torch.float32"),
        ((IMAGE, TOKENS, MASK[:, :2]), r"mask must be \[B, T\] = \[2, 3\], got shape \[2, 2\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_what_is_allowed(args: tuple[torch.Tensor, ...], message: str):
    with pytest.raises(InputError, match=message):
        build(**FILTERS)(*args)


def test_a_transformer_refuses_images_below_four_patches_a_side():
    model = build(**VIT)
    with pytest.raises(InputError, match="at least 64 x 64 pixels, 4 patches a side; got 3 x 4 patches"):
        model(torch.rand(1, 3, 48, 64), torch.randn(1, model.query_dim))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"patch_size": 15}, "patch_size must be 14 or 16, got 15"),
        ({"encoder": "vit-tiny", "patch_size": 8}, "patch_size must be 14 or 16, got 8"),
        ({"encoder": "vit-huge"}, "encoder must be one of filters, vit-tiny, .*, given, got 'vit-huge'"),
        ({"encoder": "vit-tiny", "positions": "rope"}, "positions must be one of sincos, interpolated, got 'rope'"),
        ({"positions": "interpolated"}, "need a transformer"),
        ({"layer_scale": True}, "need a transformer"),
        ({"balancer": "free"}, "balancer must be one of fixed, learned, got 'free'"),
        ({"salience_weight": -0.1}, r"balance weights must be three numbers >= 0 .* got \[0.3, -0.1, 0.3\]"),
        ({"salience_weight": float("nan")}, "balance weights must be three numbers >= 0"),
        ({"entropy_weight": 0, "salience_weight": 0, "alignment_weight": 0}, "with a sum above 0"),
        ({"balancer": "learned", "entropy_weight": 0}, "needs initial weights above 0"),
        ({"gating": "hard"}, "gating must be one of scale, straight-through, got 'hard'"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "0 <= min <= max, got min_tokens=9, max_tokens=8"),
        ({"min_tokens": -1}, "0 <= min <= max, got min_tokens=-1"),
        ({"gamma": 0.0}, "gamma must be above 0 and finite, got 0"),
        ({"gamma": float("inf")}, "gamma must be above 0 and finite, got inf"),
        ({"mean_tokens": 401}, "mean_tokens must lie in 64 to 400, got 401"),
        ({"query_dim": 0}, "query_dim must be at least 1, got 0"),
        ({**VIT, "activation": "silu"}, "activation must be one of gelu, relu, got 'silu'"),
        ({**VIT, "attention": "flash"}, "attention must be one of sdpa, explicit, got 'flash'"),
        ({**VIT, "linear": "fast"}, "linear must be one of auto, invariant, per-sample, folded, got 'fast'"),
        ({"activation": "relu"}, "need a transformer"),
        ({"linear": "folded"}, "need a transformer"),
        ({"feature_dtype": "int4"}, "feature_dtype must be one of float, int8, got 'int4'"),
        ({"encoder": "given"}, 'dim must be given if and only if encoder is "given"'),
        ({"dim": 64}, 'dim must be given if and only if encoder is "given"'),
        ({"encoder": "given", "dim": 0}, "dim and patch_size must be at least 1, got 0 and 16"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(kwargs: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        build(**kwargs)
