"""The elements of tensors are compared in every dtype, as torch compares them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.inspect.comparing import greatest_difference
from exportkit.package.dtypes import DTYPES

FLOATING = sorted(name for name in DTYPES if name.startswith(("float", "bfloat")))
INTEGERS = sorted(name for name in DTYPES if "int" in name)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(FLOATING), st.binary(min_size=64, max_size=64), st.binary(min_size=64, max_size=64))
def test_floating_elements_differ_by_as_much_as_in_torch(dtype: str, a: bytes, b: bytes) -> None:
    one, other = (torch.frombuffer(bytearray(x), dtype=getattr(torch, dtype)).double() for x in (a, b))
    same = (one == other) | (one.isnan() & other.isnan())
    expected = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    assert greatest_difference(dtype, a, b) == pytest.approx(float(expected.max()), rel=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(INTEGERS), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_integers_differ_by_as_much_as_pythons(dtype: str, a: bytes, b: bytes) -> None:
    one, other = (np.frombuffer(x, dtype).tolist() for x in (a, b))
    assert greatest_difference(dtype, a, b) == float(max(abs(x - y) for x, y in zip(one, other)))


def test_booleans_and_complex_numbers_are_compared_by_their_parts() -> None:
    assert greatest_difference("bool", b"\0\1", b"\1\1") == 1
    for dtype, part in (("complex32", "float16"), ("complex64", "float32"), ("complex128", "float64")):
        one, other = (np.array([1, 2, 3, imaginary], part).tobytes() for imaginary in (-4, -8))
        assert greatest_difference(dtype, one, other) == 4
    assert greatest_difference("float32", b"", b"") == 0
