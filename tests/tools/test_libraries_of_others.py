"""Libraries of others become packages that run without them: those of the table that are installed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from exportkit.support import PINNED_TORCH
from tools.libraries.library import Library
from tools.libraries.page import DOCUMENT
from tools.libraries.rows import ROWS
from tools.libraries.steps import missing, tried

pytestmark = pytest.mark.slow

_HERE = [row for row in ROWS if "cpu" in row.devices and not row.note]
_TAKEN = ("list", "export", "package", "load", "run")  # `package` verifies; `check` is about the library itself


@pytest.mark.parametrize("row", _HERE, ids=lambda row: row.name.split()[0])
def test_a_library_becomes_a_package_that_runs_without_it(row: Library) -> None:
    if why := missing(row):
        pytest.skip(why)
    if not torch.__version__.startswith(PINNED_TORCH):
        pytest.skip(f"the row was tried with torch {PINNED_TORCH}")
    steps = tried(row, "cpu", _TAKEN)["steps"]
    assert {step: said["said"] for step, said in steps.items() if not said["ok"]} == {}
    assert tuple(steps) == _TAKEN


def test_each_row_has_its_own_name_with_the_version_that_pip_takes() -> None:
    assert max(Counter((row.name, device) for row in ROWS for device in row.devices).values()) == 1
    for row in ROWS:
        name, _, version = row.name.partition(",")[0].rpartition(" ")
        assert row.distribution == f"{name}=={version}" or version in row.distribution


def test_the_page_names_rows_of_the_table() -> None:
    lines = DOCUMENT.read_text().splitlines()
    named = [line.split("|")[1].partition(" [")[0] for line in lines if line.startswith("|")][2:]
    assert set(named) <= {row.name for row in ROWS}
    assert named
