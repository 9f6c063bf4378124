"""Nothing is refused that is true: conditions that follow from names and ranges are proved, and layouts are tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.trace import trace
from exportkit.export.trace.traced import Traced
from tests.export import sizes_models as models


def traced(spec: ExportSpec) -> Traced:
    return trace(EagerModel(spec), TraceOptions(), torch.device("cpu"), lambda _: None)


def sizes_of_cases(found: Traced) -> list[dict[str, int]]:
    return [dict(call.sizes) for case in found.cases for call in case.calls]


def test_a_decoders_step_of_one_token_is_taken_at_every_length() -> None:
    found = traced(models.step())
    (method,) = found.methods
    assert {d.name: (d.min, d.max) for d in method.call.dimensions} == {"batch": (1, 8), "length": (1, 100)}
    assert str(method.call.outputs[1].shape[2]) == "length+1"
    assert {"batch": 1, "length": 1} in sizes_of_cases(found)


@settings(max_examples=6, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(st.lists(st.sampled_from(models.BLOCKS), min_size=2, max_size=2, unique=True), st.integers(3, 30))
def test_what_holds_by_construction_is_never_refused(blocks: list[Callable[[Tensor], Tensor]], n: int) -> None:
    """`trace` also holds the program against eager, at the ends and wherever a layout was in doubt."""
    (method,) = traced(models.chain(*blocks, n=n)).methods
    assert {d.name: (d.min, d.max) for d in method.call.dimensions} == {"batch": (1, 8), "n": (2, 100)}


@pytest.mark.parametrize("block", models.BLOCKS, ids=lambda block: block.__name__.strip("_"))
def test_each_block_is_taken_from_an_example_of_any_size(block: Callable[[Tensor], Tensor]) -> None:
    """And the program itself, as torch loads it, takes all declared sizes."""
    (method,) = traced(models.chain(block, n=3)).methods
    for n in (2, 3, 100):
        x = torch.randn(1, n, 8)
        torch.testing.assert_close(method.program.module()(x), block(x))


def test_where_a_layout_is_in_doubt_the_package_has_a_case() -> None:
    assert {"batch": 2, "n": 3} in sizes_of_cases(traced(models.chain(models.BLOCKS[0])))


@pytest.mark.parametrize(
    ("block", "needs", "advice"),
    [
        (models.squeezed, "(x:1//2) != 1", "'x:1=n[4:100]'"),
        (models.asks_half, "(x:1//2) != 1", "'x:1=n[4:100]'"),
        (models.small_batch_of_halves, "x:0 < 5", "'x:0=batch[1:4]'"),
        (models.small_half, "((x:1//2)) <= 20", "'x:1=n[2:41]'"),
        (models.few_rows, "x:1*x:0 <= 100", ""),
    ],
)
def test_what_is_untrue_is_refused_and_narrowed_no_more_than_needed(
    block: Callable[[Tensor], Tensor], needs: str, advice: str
) -> None:
    with pytest.raises(ExportError) as caught:
        traced(models.chain(block))
    assert f"needs {needs}" in caught.value.message
    assert caught.value.message.count("needs") == 1
    hint = caught.value.hint or ""
    assert hint.startswith(f"Write --dynamic {advice} (") if advice else "Change that line" in hint


def test_sizes_that_eager_refuses_are_no_reason_to_refuse_the_others() -> None:
    assert traced(models.chain(models.legal_rows))
