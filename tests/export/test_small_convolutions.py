"""Small convolutions as products: equal to aten's, and only where they are small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.export.small_convolutions import decomposed, is_small

CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


def computed(x, weight, bias, *, stride=(1,), padding=(0,), dilation=(1,), transposed=False, groups=1):
    return decomposed(x, weight, bias, stride, padding, dilation, transposed, [0] * len(stride), groups)


@st.composite
def calls(draw):
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
def test_a_small_convolution_is_what_aten_computes(call):
    x, weight, bias, options = call
    found = computed(x, weight, bias, **options)
    expected = CONVOLUTIONS[x.dim() - 2](x, weight, bias, **options)
    if found is not NotImplemented:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()
