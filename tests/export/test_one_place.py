"""Inductor adds vectors to one element, as index_add does into one column: torch's own code fails in an assertion."""

from __future__ import annotations

import torch

from exportkit.export.compile.inductor_changes import changed_inductor


def sums(x: torch.Tensor, rows: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums whose places do not vary along a vector: a target of one element, in each dtype, and of one column."""
    one = x.new_zeros(1, 1).index_add(0, rows * 0, x)
    half = x.new_zeros(1, dtype=torch.bfloat16).index_add(0, rows * 0, (x[:, 0] * 0 + 1).bfloat16())
    whole = rows.new_zeros(1).scatter_add(0, rows * 0, rows)
    each = x.new_zeros(5).index_put((rows[:, None].expand_as(wide),), wide, accumulate=True)
    return one, half, whole, each


def test_vectors_are_added_to_one_element() -> None:
    """37 and 19 elements are no whole vectors."""
    inputs = torch.rand(37, 1), torch.arange(37) % 5, torch.rand(37, 19)
    # As in packages: the number of threads is that of the machine that runs the code.
    options = {"cpp.dynamic_threads": True, "fx_graph_cache": False}
    with changed_inductor():
        compiled = torch.compile(sums, options=options)(*inputs)
    for found, wanted in zip(compiled, sums(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)
