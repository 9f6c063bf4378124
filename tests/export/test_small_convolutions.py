"""Small convolutions as products: equal to aten's, and only where they are small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exportkit.export.compile.small_convolutions import decomposed

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


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


@settings(max_examples=200, deadline=None)
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
        (torch.randn(2, 1, 640), torch.randn(258, 1, 256), {"stride": (128,)}),
        (torch.randn(2, 129, 4), torch.randn(128, 129, 3), {"padding": (1,)}),
        (torch.randn(2, 1, 49, 10), torch.randn(64, 1, 10, 4), {"stride": (2, 2), "padding": (5, 1)}),
        (torch.randn(2, 64, 25, 5), torch.randn(64, 1, 3, 3), {"padding": (1, 1), "groups": 64}),
        (torch.randn(2, 64, 25, 5), torch.randn(64, 64, 1, 1), {}),
    ],
    ids=["transform", "narrow", "few-channels", "depthwise", "pointwise"],
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
        (X, torch.randn(32, 1, 3), {"groups": 16}),
        (X, torch.randn(16, 1, 9), {"groups": 16, "dilation": (8,)}),
        (torch.randn(1, 64, 64, 64), torch.randn(64, 64, 3, 3), {}),
        (torch.randn(1, 3, 224, 224), torch.randn(192, 3, 16, 16), {"stride": (16, 16)}),
        (torch.randn(1, 1, 28, 28), torch.randn(8, 1, 3, 3), {}),
        (X[0], WEIGHT, {}),
    ],
    ids=[
        *("transposed", "bfloat16", "float64", "another-device", "groups", "two-outputs-a-group", "no-positions"),
        *("many-products", "patches", "short-runs", "no-batch"),
    ],
)
def test_others_are_left_alone(x: Tensor, weight: Tensor, options: dict[str, Any]) -> None:
    assert computed(x, weight, **options) is NotImplemented


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
