"""What the page of planted faults says is found is found, with drawn calls alone, and nothing in right operators."""

from __future__ import annotations

import json

import pytest

from exportkit.operators.contract.definition import checks
from tests.operators.planted.table import PLANTED, RIGHT, Planted
from tools import planted_faults

KEPT = json.loads(planted_faults.RUN.read_text())
FOUND = [fault for fault in PLANTED if planted_faults.is_found(fault, KEPT)]
EVERY_PUSH = {
    "aliasing": ["one_answer"],
    "determinism": ["tail_not_written"],
    "gradcheck": ["gradient_sign_float32", "gradient_term_float32", "gradient_flag"],
    "influence": ["row_sum_short", "last_ignored"],
    "large": ["static_scratch_for_long_rows", "grain_tail"],
    "own-float64": ["narrow_sum", "sum_tail"],
    "refuses-alike": ["weight_of_one", "index_unchecked", "fake_promotion"],
    "strides": ["peels_two"],
}


def test_the_page_is_that_of_the_run_and_enough_is_found():
    assert planted_faults.DOCUMENT.read_text() == planted_faults.page(KEPT), "stale: python -m tools.planted_faults"
    assert len(PLANTED) >= 40
    assert len(FOUND) >= 38
    assert {check for fault in PLANTED for check in fault.checks} <= {*checks(), "crash"}


@pytest.mark.parametrize("check", EVERY_PUSH)
def test_faults_of_a_kind_are_found_and_not_in_right_operators(check: str):
    found = planted_faults.found([*EVERY_PUSH[check], *RIGHT[:4]], 0, [check])
    assert {name for name, named in found.items() if named == [check]} == set(EVERY_PUSH[check])
    assert not any(found[name] for name in RIGHT[:4])


@pytest.mark.slow
@pytest.mark.parametrize("seed", planted_faults.SEEDS)
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.operator) for fault in FOUND])
def test_a_fault_that_the_page_says_is_found_is_found(fault: Planted, seed: int):
    found = planted_faults.found([fault.operator], seed, planted_faults.meant(fault))
    assert set(found[fault.operator]) & set(fault.checks)


@pytest.mark.slow
def test_nothing_is_found_in_right_operators():
    assert planted_faults.found(RIGHT, 0) == {name: [] for name in RIGHT}
