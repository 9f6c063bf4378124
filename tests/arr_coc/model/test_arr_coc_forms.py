"""The forms the model takes: fused when evaluating without gradients, features that are given, int8, other encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from exportkit.arr_coc.model import FromFeatures, build
from exportkit.arr_coc.model.encoder import LayerNorm
from exportkit.arr_coc.model.linear import LINEARS, LinearForm, SampleLinear, dtype_of_product, form_of_auto
from exportkit.arr_coc.model.selection import Selector
from exportkit.errors import InputError, UsageError
from exportkit.precision import with_tf32
from tests.arr_coc.model.model_cases import ALL, FILTERS, FILTERS_14, PIPELINE, VIT, answer, inputs

pytestmark = pytest.mark.usefixtures("two_blocks")

CONFIGS = [pytest.param(kwargs, id=name) for name, kwargs in ALL.items()]
FUSED = {"texture_statistics", "relevance_scores", "select_patches"}
COMPOSED = set(PIPELINE)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "arr_coc":
            # With gradients, the form of an operator that keeps what its gradient reads.
            self.names.add(func._schema.name.removeprefix("arr_coc::").removesuffix("_forward"))
        return func(*args, **(kwargs or {}))


# --- fused and composed -----------------------------------------------------------------------------------------------


@pytest.mark.slow_but("filters-*", "vit-vector-torch.float32", "vit-masked tokens-torch.bfloat16")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [None, 3], ids=["vector", "masked tokens"])
@pytest.mark.parametrize("kwargs", CONFIGS)
def test_the_fused_forms_give_what_the_differentiable_ones_give(
    kwargs: dict[str, Any], tokens: int | None, dtype: torch.dtype
):
    model = build(**kwargs, invert_entropy=tokens is not None).to(dtype)
    mask = None if tokens is None else torch.tensor([[True, False, True], [False, True, False]])
    for rows, columns in [(4, 4), (5, 9), (13, 7)]:
        image, query = (tensor.to(dtype) for tensor in inputs(model, 2, rows, columns, tokens))
        composed, fused = model(image, query, mask), answer(model, image, query, mask)
        assert list(composed) == list(fused)
        torch.testing.assert_close(fused["relevance"], composed["relevance"], rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mean_tokens", [None, 100])
@pytest.mark.parametrize(("rows", "columns"), [(5, 4), (13, 17)], ids=["all patches", "some"])
def test_the_same_is_selected_in_both_forms(rows: int, columns: int, mean_tokens: int | None, dtype: torch.dtype):
    selector = Selector(k=50, gamma=1.5, mean_tokens=mean_tokens).eval()
    relevance = torch.rand(3, rows * columns).to(dtype)
    relevance[:, 7:11] = relevance[:, 3:4]
    given = relevance, torch.randn(3, rows * columns, 24).to(dtype), (rows, columns)
    with _Calls() as calls:
        composed = selector(*given)
    assert calls.names == {"top_k_patches", "allocate_lod_tokens"}
    with torch.no_grad(), _Calls() as calls:
        fused = selector(*given)
    assert calls.names == {"select_patches"}
    assert composed.feature_scales is fused.feature_scales is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused[:-1], composed[:-1]))


@pytest.mark.parametrize(
    ("gradients", "training", "fused"),
    [
        (torch.no_grad, False, True),
        (torch.inference_mode, False, True),
        (torch.no_grad, True, False),
        (torch.enable_grad, False, False),
    ],
)
@pytest.mark.parametrize("kwargs", [VIT, FILTERS], ids=["vit", "filters"])
def test_which_operators_run(kwargs: dict[str, Any], gradients: Any, training: bool, fused: bool):
    model = build(**kwargs).train(training)
    image, query = inputs(model, 1, 4, 5)
    with gradients(), _Calls() as calls:
        model(image, query)
    # A transformer's images are never made into maps; the filters look at one of them.
    relevance = FUSED | ({"fused_texture"} if kwargs is FILTERS else set()) if fused else COMPOSED
    assert calls.names & (FUSED | COMPOSED) == relevance


# --- features that are given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [FILTERS_14, VIT], ids=["filters", "vit"])
def test_given_the_encoders_own_features_the_model_answers_as_with_its_encoder(kwargs: dict[str, Any]):
    model = build(**kwargs)
    image, query = inputs(model, 2, 5, 6)
    given = FromFeatures(model).eval()
    with torch.no_grad():
        features = model.encode(image).unflatten(1, (5, 6))
        expected, outputs = model(image, query), given(image, features, query)
    assert list(outputs) == list(expected)
    assert all(torch.equal(outputs[name], expected[name]) for name in expected)


def test_given_features_get_gradients():
    given = FromFeatures(build(encoder="given", dim=24, patch_size=8, balancer="learned")).train()
    features = torch.randn(2, 4, 5, 24, requires_grad=True)
    given(torch.rand(2, 3, 32, 40), features, torch.randn(2, 24))["scores"].sum().backward()
    assert features.grad is not None
    assert features.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 20, 24), torch.float32, r"features must be \[B, H / P, W / P, D\], got shape \[2, 20, 24\]"),
        ((2, 4, 5, 23), torch.float32, r"must be \[B, N, D\] = \[2, 20, 24\] .* shape \[2, 20, 23\]"),
        ((2, 4, 4, 24), torch.float32, r"must be \[B, N, D\] = \[2, 20, 24\] .* shape \[2, 16, 24\]"),
        ((2, 4, 5, 24), torch.float64, "of the image's patches in its dtype, got torch.float64"),
    ],
    ids=["rank", "width", "patches", "dtype"],
)
def test_features_that_do_not_fit_the_image_are_refused(shape: tuple[int, ...], dtype: torch.dtype, message: str):
    given = FromFeatures(build(encoder="given", dim=24, patch_size=8))
    with pytest.raises(InputError, match=message):
        given(torch.rand(2, 3, 32, 40), torch.zeros(shape, dtype=dtype), torch.randn(2, 24))


def test_a_model_of_given_features_cannot_encode():
    with pytest.raises(UsageError, match="features are an input"):
        build(encoder="given", dim=24)(torch.rand(2, 3, 32, 48), torch.randn(2, 24))


# --- int8 features ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gating", ["scale", "straight-through"])
@pytest.mark.parametrize("kwargs", [FILTERS, VIT], ids=["filters", "vit"])
def test_int8_features_are_within_half_a_step_of_the_floats(kwargs: dict[str, Any], gating: str, dtype: torch.dtype):
    floats, integers = (build(**kwargs, gating=gating, feature_dtype=name).to(dtype) for name in ("float", "int8"))
    image, query = (tensor.to(dtype) for tensor in inputs(floats, 2, 5, 6))
    expected, outputs = answer(floats, image, query), answer(integers, image, query)
    assert list(outputs) == [*list(expected)[:-1], "feature_scales", "relevance"]
    assert outputs["features"].dtype == torch.int8
    assert outputs["feature_scales"].dtype == torch.float32
    assert outputs["features"].abs().amax(2).eq(127).all()
    assert all(torch.equal(outputs[name], expected[name]) for name in expected if name != "features")
    # What the floats are before a half type rounds them.
    rows = (
        floats.encode(image)
        .detach()
        .double()
        .gather(1, expected["indices"].unsqueeze(2).expand_as(expected["features"]))
    )
    gated = rows * expected["scores"].double().unsqueeze(2) if gating == "scale" else rows
    steps = outputs["feature_scales"].double().unsqueeze(2)
    assert ((outputs["features"] * steps - gated).abs() <= steps * (0.5 + 1e-3)).all()


def test_a_model_of_int8_features_trains_on_floats():
    model = build(**VIT, feature_dtype="int8", k=9).train()
    outputs = model(*inputs(model, 1, 4, 5))
    assert "feature_scales" not in outputs
    outputs["features"].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- the transformer's options ----------------------------------------------------------------------------------------


def test_layer_norm_is_torchs():
    ours, torchs = LayerNorm(48, eps=1e-6), nn.LayerNorm(48, eps=1e-6)
    for module in (ours, torchs):
        module.load_state_dict({"weight": torch.linspace(0.5, 1.5, 48), "bias": torch.linspace(-1, 1, 48)})
    x = torch.randn(2, 5, 48) + 3
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-5, atol=1e-5)


def test_explicit_attention_is_torchs():
    sdpa, explicit = (build(**VIT, attention=form) for form in ("sdpa", "explicit"))
    image, _ = inputs(sdpa, 2, 5, 6)
    with torch.no_grad():
        torch.testing.assert_close(explicit.encode(image), sdpa.encode(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", LINEARS)
def test_every_form_of_a_linear_layer_is_torchs(form: LinearForm):
    layer = SampleLinear(48, 20, form).eval()
    x = torch.randn(3, 17, 48)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.product(x), nn.functional.linear(x, layer.weight), rtol=1e-4, atol=1e-5)


def test_the_folded_form_has_one_product_for_all_samples():
    model = build(**VIT, linear="folded").eval()
    image, _ = inputs(model, 3, 5, 6)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.encode(image)
    products = {str(op) for op in counted.get_flop_counts()["Global"]}
    assert not {op for op in products if "bmm" in op}, products


@pytest.mark.parametrize(
    ("device_type", "dtype", "tf32", "form"),
    [
        ("cpu", torch.float32, False, "per-sample"),
        ("cpu", torch.bfloat16, True, "per-sample"),
        ("cuda", torch.float32, False, "invariant"),
        ("cuda", torch.float32, True, "per-sample"),
        ("cuda", torch.float64, True, "invariant"),
        ("cuda", torch.float16, False, "folded"),
        ("cuda", torch.bfloat16, True, "folded"),
    ],
)
def test_the_form_of_auto_suits_device_and_precision(device_type: str, dtype: torch.dtype, tf32: bool, form: str):
    with with_tf32(tf32):
        assert form_of_auto(device_type, dtype) == form
        compiled = torch.compile(
            lambda x: x + LINEARS.index(form_of_auto(device_type, dtype)), fullgraph=True, backend="eager"
        )
        assert LINEARS[int(compiled(torch.zeros(())))] == form


@pytest.mark.parametrize("compiled", [False, True])
def test_the_form_of_auto_knows_autocast(compiled: bool):
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if dtype_of_product(x) == torch.bfloat16 else x

    tried = torch.compile(halved, fullgraph=True, backend="eager") if compiled else halved
    zeros = torch.zeros(2)
    assert not tried(zeros).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert tried(zeros).all()
        assert not tried(zeros.double()).any()
    assert not tried(zeros).any()


@pytest.mark.parametrize("form", LINEARS)
def test_training_has_one_product_for_all_samples_in_the_dtype_of_autocast(form: LinearForm):
    model = build(**VIT, linear=form).train()
    image, _ = inputs(model, 3, 5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.encoder.patch_embed(image).dtype == torch.bfloat16
        assert model.encoder.blocks[0].mlp(torch.randn(3, 30, 192)).dtype == torch.bfloat16


@pytest.mark.parametrize("training", [False, True])
def test_relu_is_torchs_after_the_same_linear_layer(training: bool):
    mlp = build(**VIT, activation="relu").encoder.blocks[0].mlp.train(training)
    nn.init.normal_(mlp.fc1.bias)
    x = torch.randn(2, 20, 192)
    torch.testing.assert_close(mlp(x), mlp.fc2(torch.relu(mlp.fc1(x))), rtol=1e-4, atol=1e-5)
