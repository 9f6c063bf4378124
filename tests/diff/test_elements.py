"""The elements of tensors are compared in every dtype, as torch compares them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.diff.elements import greatest_difference, in_order
from exportkit.package.dtypes import DTYPES

FLOATING = sorted(name for name in DTYPES if name.startswith(("float", "bfloat")))
INTEGERS = sorted(name for name in DTYPES if "int" in name)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(FLOATING), st.binary(min_size=16, max_size=64), st.binary(min_size=64, max_size=64))
def test_floating_elements_differ_by_as_much_as_in_torch(dtype: str, a: bytes, b: bytes) -> None:
    a = a[: len(a) // 8 * 8]
    b = b[: len(a)]
    one, other = (torch.frombuffer(bytearray(x), dtype=getattr(torch, dtype)).double() for x in (a, b))
    same = (one == other) | (one.isnan() & other.isnan())
    expected = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    assert greatest_difference(dtype, a, b) == float(expected.max())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(INTEGERS), st.binary(min_size=8, max_size=32), st.binary(min_size=32, max_size=32))
def test_integers_differ_by_as_much_as_pythons(dtype: str, a: bytes, b: bytes) -> None:
    a = a[: len(a) // 8 * 8]
    b = b[: len(a)]
    one, other = (np.frombuffer(x, dtype).tolist() for x in (a, b))
    assert greatest_difference(dtype, a, b) == float(max(abs(x - y) for x, y in zip(one, other)))


def test_booleans_and_complex_numbers_are_compared_by_their_parts() -> None:
    assert greatest_difference("bool", b"\0\1", b"\1\1") == 1
    for dtype, part in (("complex32", "float16"), ("complex64", "float32"), ("complex128", "float64")):
        one, other = (np.array([1, 2, 3, imaginary], part).tobytes() for imaginary in (-4, -8))
        assert greatest_difference(dtype, one, other) == 4
    assert greatest_difference("float32", b"", b"") == 0


@settings(max_examples=20, deadline=None)
@given(st.permutations([0, 1, 2]), st.sampled_from(["uint8", "bfloat16", "float64", "complex128"]))
def test_elements_are_put_into_the_order_of_their_indices(order: list[int], dtype: str) -> None:
    shape = (2, 3, 4)
    memory = torch.arange(24).to(torch.float64).to(getattr(torch, dtype)).reshape([shape[i] for i in order])
    tensor = memory.permute([order.index(i) for i in range(3)])
    assert tuple(tensor.shape) == shape
    stored = bytes(memory.contiguous().reshape(-1).view(torch.uint8).tolist())
    expected = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    assert in_order(stored, dtype, shape, tensor.stride()) == expected
