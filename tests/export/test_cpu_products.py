"""What export makes of products on a CPU: packed weights, small convolutions, attention whose heads share keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import exportkit
from exportkit.export.artifact import export_aoti
from exportkit.export.compile import packed_weights
from exportkit.export.compile.packed_weights import pack
from exportkit.export.compile.shared_heads import heads_as_queries
from exportkit.export.compile.small_convolutions import decomposed
from exportkit.export.export_options import TraceOptions
from exportkit.package.archive import PackageReader
from exportkit.package.elf import read_elf
from tests.artifacts import artifact
from tests.drawn import examples
from tests.export.function_models import FunctionModel, spec_of
from tests.export.small_models import Small

# --- weights in the order that products read -------------------------------------------------------------------------


aten = torch.ops.aten


def graph_of(model: nn.Module, *inputs: Tensor) -> torch.fx.GraphModule:
    """The model's operators as Inductor sees them."""
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model.eval(), inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    module = program.run_decompositions().module()
    assert isinstance(module, torch.fx.GraphModule)
    return module


def packed(module: torch.fx.GraphModule) -> set[str]:
    """Packs the weights; returns the kinds of nodes that are computed once."""
    computed = pack(module.graph)
    module.graph.lint()
    module.recompile()
    return {str(node.target) for node in computed}


def count(module: torch.fx.GraphModule, target: object) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_takes_transposed_weights_and_adds_its_bias_apart(bias: bool) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.ReLU()), torch.randn(3, 6)
    module = graph_of(model, x)
    assert packed(module) == {"aten.permute.default", "aten.clone.default"}
    assert count(module, aten.addmm.default) == 0
    torch.testing.assert_close(module(x), model(x))
    [product] = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert product.args[1].meta["val"].is_contiguous()


def test_the_roots_of_a_normalization_are_computed_once() -> None:
    """What Inductor makes of a BatchNorm."""
    model = FunctionModel(lambda x: (x - model.mean[:, None]) * (model.variance + 1e-5).sqrt().reciprocal()[:, None])
    model.mean, model.variance, x = (
        nn.Parameter(torch.randn(5)),
        nn.Parameter(torch.rand(5) + 0.5),
        torch.randn(3, 5, 2),
    )
    module = graph_of(model, x)
    assert packed(module) == {"aten.add.Tensor", "aten.sqrt.default", "aten.reciprocal.default"}
    torch.testing.assert_close(module(x), model(x))


@pytest.mark.slow
def test_roots_of_inputs_single_numbers_and_large_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FunctionModel(lambda x: x.sqrt() * model.one.exp() + model.many.sqrt() + (model.many * x).exp())
    model.one, model.many = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(9))
    monkeypatch.setattr(packed_weights, "MOST_ELEMENTS", 8)
    assert not packed(graph_of(model, torch.rand(3, 9)))
    monkeypatch.setattr(packed_weights, "MOST_ELEMENTS", 9)
    assert packed(graph_of(model, torch.rand(3, 9))) == {"aten.sqrt.default"}


@pytest.mark.slow
def test_large_weights_stay_where_the_package_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), torch.randn(3, 6)
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 4 * (30 + 20) - 1)
    module = graph_of(model, x)
    assert not packed(module)
    assert count(module, aten.addmm.default) == 2
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 4 * (30 + 20))
    assert packed(graph_of(model, x))


@pytest.mark.slow
def test_tied_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nn.Linear(5, 5)
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 4 * 25)
    assert packed(graph_of(nn.Sequential(first, nn.ReLU(), first), torch.randn(3, 5)))


def test_other_products_are_left_alone() -> None:
    """Those whose second factor is an input, contiguous, or of another dtype."""
    model = FunctionModel(lambda x, y: (x @ model.straight @ y.t()).sum() + model.low(x.bfloat16()).sum())
    model.straight, model.low = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4, dtype=torch.bfloat16)
    module = graph_of(model, torch.randn(3, 4), torch.randn(3, 4))
    before = str(module.graph)
    assert not packed(module)
    assert str(module.graph) == before


@pytest.mark.slow
def test_the_code_calls_no_convolution_and_takes_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 2, 16)
    with PackageReader(artifact("small-convolutions")) as reader:
        [library] = [name for name in reader.names if name.endswith(".so")]
        reader.extract(library, tmp_path / "model.so")
    symbols = read_elf(tmp_path / "model.so").torch_symbols
    assert "aoti_torch_cpu_mm_out" in symbols
    assert not {name for name in symbols if "convolution" in name or "addmm" in name}
    for runtime in ("auto", "python"):
        monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
        with exportkit.load(artifact("small-convolutions"), device="cpu", runners=2) as model:
            torch.testing.assert_close(model(x), Small(0)(x))
            model.swap_weights(Small(1).state_dict())
            torch.testing.assert_close(model(x), Small(1)(x))


# --- small convolutions as products: equal to aten's, and only where they are small ----------------------------------


CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


def computed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    groups: int = 1,
) -> Any:
    return decomposed(x, weight, bias, stride, padding, dilation, transposed, [0] * len(stride), groups)


Call = tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Small convolutions of every kind: each is computed as a product, or is one of those that are left alone."""
    dims = draw(st.integers(1, 3))
    each = st.tuples(*[st.integers(1, 4)] * dims)
    channels, depthwise = draw(st.sampled_from((1, 2, 3, 7, 8, 9, 16))), draw(st.booleans())
    kernel, stride, dilation = draw(each), draw(each), draw(each)
    padding = draw(st.tuples(*[st.integers(0, 3)] * dims))
    reach = [hole * (taps - 1) + 1 for taps, hole in zip(kernel, dilation)]
    size = [max(least - 2 * pad, 1) + draw(st.integers(0, 5)) for least, pad in zip(reach, padding)]
    outputs = channels if depthwise else draw(st.integers(1, 9))
    torch.manual_seed(draw(st.integers(0, 9)))
    x = torch.randn(draw(st.integers(1, 3)), channels, *size)
    if draw(st.booleans()):
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    weight = torch.randn(outputs, 1 if depthwise else channels, *kernel)
    bias = torch.randn(outputs) if draw(st.booleans()) else None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": channels if depthwise else 1}
    return x, weight, bias, options


@settings(max_examples=examples(200), deadline=None)
@given(calls())
def test_a_small_convolution_is_what_aten_computes(call: Call) -> None:
    x, weight, bias, options = call
    found = computed(x, weight, bias, **options)
    if found is not NotImplemented:
        expected = CONVOLUTIONS[x.dim() - 2](x, weight, bias, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()


X, WEIGHT = torch.randn(2, 16, 10), torch.randn(4, 16, 3)


def test_an_empty_batch_has_an_empty_answer() -> None:
    assert computed(X[:0], WEIGHT).shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        (torch.randn(2, 1, 640), torch.randn(258, 1, 256), {"stride": (128,)}),  # a transform
        (torch.randn(2, 129, 4), torch.randn(128, 129, 3), {"padding": (1,)}),
        (torch.randn(2, 1, 49, 10), torch.randn(64, 1, 10, 4), {"stride": (2, 2), "padding": (5, 1)}),
        (torch.randn(2, 64, 25, 5), torch.randn(64, 1, 3, 3), {"padding": (1, 1), "groups": 64}),
        (torch.randn(2, 64, 25, 5), torch.randn(64, 64, 1, 1), {}),
    ],
)
def test_the_convolutions_of_small_models_are_small(x: Tensor, weight: Tensor, options: dict[str, Any]) -> None:
    assert computed(x, weight, **options) is not NotImplemented


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        (X, torch.randn(16, 4, 3), {"transposed": True}),
        (X.bfloat16(), WEIGHT.bfloat16(), {}),
        (X.double(), WEIGHT.double(), {}),
        (X.to("meta"), WEIGHT.to("meta"), {}),
        (X, torch.randn(4, 8, 3), {"groups": 2}),
        (X, torch.randn(32, 1, 3), {"groups": 16}),  # two outputs of a group
        (X, torch.randn(16, 1, 9), {"groups": 16, "dilation": (8,)}),  # no positions
        (torch.randn(1, 64, 64, 64), torch.randn(64, 64, 3, 3), {}),  # many products
        (torch.randn(1, 3, 224, 224), torch.randn(192, 3, 16, 16), {"stride": (16, 16)}),  # patches
        (torch.randn(1, 1, 28, 28), torch.randn(8, 1, 3, 3), {}),  # short runs
        (X[0], WEIGHT, {}),
    ],
)
def test_others_are_left_alone(x: Tensor, weight: Tensor, options: dict[str, Any]) -> None:
    assert computed(x, weight, **options) is NotImplemented


@pytest.mark.slow_but("0-True")
@pytest.mark.parametrize(("axis", "small"), [(0, True), (2, False)])
def test_only_the_batch_may_be_dynamic(axis: int, small: bool) -> None:
    model = torch.nn.Conv1d(16, 4, 3)
    shapes = {axis: torch.export.Dim("size", min=2 + axis, max=64)}
    program = torch.export.export(model, (X,), dynamic_shapes=(shapes,))
    table = torch.export.default_decompositions()
    table[torch.ops.aten.convolution.default] = decomposed
    program = program.run_decompositions(table)
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == small
    torch.testing.assert_close(program.module()(X), model(X))


# --- attention of one query over shared keys -------------------------------------------------------------------------


BATCH, HEADS, SHARED, LENGTH, WIDTH = 3, 6, 2, 33, 16
HALVES = (torch.float16, torch.bfloat16)
# What is added to the scores, of every form that torch takes. The last key is never seen.
MASKS = [(), (1, LENGTH), (1, 1, 1, LENGTH), (BATCH, 1, 1, LENGTH), (1, HEADS, 1, LENGTH), (BATCH, HEADS, 1, LENGTH)]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attention_inputs(dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> list[Tensor]:
    keys = (batch, SHARED, LENGTH, WIDTH)
    return tensors((batch, HEADS, 1, WIDTH), keys, keys, dtype=dtype, seed=seed)


def masked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    if not shape:
        return None
    (mask,) = tensors(shape, dtype=dtype, seed=1)
    mask[..., -1] = -torch.inf
    return mask


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_it_is_attention_of_every_head_with_its_keys(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    inputs, mask = attention_inputs(dtype), masked(shape, dtype)
    attended, sums = heads_as_queries(*inputs, attn_mask=mask, scale=scale)
    query, key, value = (each.double() for each in inputs)
    key, value = (each.repeat_interleave(HEADS // SHARED, dim=1) for each in (key, value))
    scores = query @ key.mT * (scale or WIDTH**-0.5) + (0 if mask is None else mask.double())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(attended.double(), scores.softmax(-1) @ value, rtol=8 * unit, atol=8 * unit)
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=8 * unit, atol=8 * unit)


def test_other_attention_stays_as_it_is() -> None:
    query, key, value = attention_inputs()
    assert heads_as_queries(query, query, query) is NotImplemented
    assert heads_as_queries(query.expand(-1, -1, 2, -1), key, value) is NotImplemented
    assert heads_as_queries(query, key, value, is_causal=True) is NotImplemented


def attending(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with shared keys over a mask of bool, of one query and of two."""

    def attended(queries: Tensor) -> Tensor:
        return scaled_dot_product_attention(queries, key, value, seen[:, None, None], enable_gqa=True)

    return attended(query), attended(torch.cat([query, -query], dim=2))


@pytest.mark.slow
def test_compiled_code_has_it_for_each_batch(tmp_path: Path) -> None:
    inputs = (*attention_inputs(), torch.rand(BATCH, LENGTH) > 0.5)
    shapes = {name: {0: "batch[1:8]"} for name in ("query", "key", "value", "seen")}
    export_aoti(spec_of(attending, *inputs, shapes=shapes), tmp_path / "attention.pt2", TraceOptions("cpu"))
    with exportkit.load(tmp_path / "attention.pt2", "cpu") as loaded:
        for batch in (1, 2, 8):
            inputs, seen = attention_inputs(seed=batch, batch=batch), torch.rand(batch, LENGTH) > 0.5
            answers, wide = loaded(*inputs, seen), attending(*(each.double() for each in inputs), seen)
            for answer, expected in zip(answers, wide):
                torch.testing.assert_close(answer.double(), expected, rtol=1e-5, atol=1e-6)
            added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            assert torch.equal(answers[0], heads_as_queries(*inputs, attn_mask=added[:, None, None])[0])
            assert not torch.equal(answers[0], attending(*inputs, seen)[0])  # ATen's kernel rounds otherwise
