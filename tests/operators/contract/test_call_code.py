"""The code of a call makes this call, whatever its tensors are."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.operators.contract.call_code import ways_to_write
from exportkit.operators.contract.check_fakes import steps
from exportkit.operators.contract.memory_layouts import PLAIN, STRIDED
from exportkit.operators.contract.sample import Sample

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    values = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, -3.0, math.nan, math.inf]), min_size=count, max_size=count))
    dtype = draw(st.sampled_from(DTYPES))
    finite = torch.tensor(values, dtype=torch.float64).nan_to_num(7, 9).abs()
    own = torch.tensor(values, dtype=torch.float64) if dtype.is_floating_point else finite
    tensor = own.to(dtype).view(shape)
    return tensor.permute(draw(st.permutations(range(tensor.dim())))) if tensor.dim() else tensor


NUMBERS = st.sampled_from([1, True, None, 0.5, math.inf, "mean", torch.float16, torch.device("cpu"), (1, 2), [3]])


def value_of(code: str) -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(f"value = {code}", names)
    return names["value"]


@settings(max_examples=30)
@given(
    st.lists(st.one_of(tensors(), NUMBERS), max_size=3), st.sampled_from([PLAIN, *STRIDED]), st.sampled_from([None, 0])
)
def test_the_code_evaluates_to_the_call(values, layout, number):
    call = Sample("", tuple(values), {"last": values[-1]} if values else {})
    for way in ways_to_write(call, layout, number):
        torch.manual_seed(0)
        found = [value_of(code) for code in (*way.args, *way.kwargs.values())]
        made = [value for value in found if isinstance(value, torch.Tensor)]
        for index, (written, own) in enumerate(zip(made, way.call.tensors)):
            expected = layout.apply(own) if number in (None, index) else own
            assert written.dtype == expected.dtype
            assert steps(written) == steps(expected)
            assert torch.equal(written.nan_to_num(7), expected.nan_to_num(7))
        rest = [value for value in found if not isinstance(value, torch.Tensor)]
        assert rest == [v for v in (*call.args, *call.kwargs.values()) if not isinstance(v, torch.Tensor)]
    *_, last = ways_to_write(call)
    for written, own in zip(last.call.tensors, call.tensors):
        assert steps(written) == steps(own)
        if own.numel() <= 64:  # more are drawn
            assert torch.equal(written.nan_to_num(7), own.nan_to_num(7))
