"""Shared memory is found as a comparison byte by byte finds it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit.runtime.overlap import Spans, span

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=6)


@given(PIECES, st.integers(0, 30), st.integers(0, 6))
def test_a_tensor_that_shares_bytes_with_others_is_found(pieces, start, length):
    base = torch.zeros(64)
    taken: set[int] = set()
    kept = {}
    for number, (first, count) in enumerate(pieces):
        if taken.isdisjoint(range(first, first + count)):
            taken |= set(range(first, first + count))
            kept[str(number)] = base[first : first + count]
    asked = set(range(start, start + length))
    name = Spans(kept.items()).overlapping(base[start : start + length])
    assert (name is not None) == bool(taken & asked)
    if name is not None:
        first, count = pieces[int(name)]
        assert asked & set(range(first, first + count))


def test_the_span_of_a_view_reaches_to_its_last_element():
    base = torch.zeros(8, 8)
    assert span(base.T) == (base.data_ptr(), base.data_ptr() + base.nbytes)
    assert span(base[2:4, 1]) == (base.data_ptr() + 17 * 4, base.data_ptr() + 26 * 4)
    assert span(torch.zeros(0, 3)) == (0, 0)
    scalar = torch.tensor(1.0)
    assert span(scalar) == (scalar.data_ptr(), scalar.data_ptr() + 4)
