"""The matrix of torches: what is compared, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exportkit.support import EXPORTING_TORCHES
from tools import torch_matrix
from tools.torch_replay import replay


def test_a_replay_counts_the_answers_and_has_the_same_bits_again(tiny_package: Path) -> None:
    first = replay(str(tiny_package))
    assert first == replay(str(tiny_package))
    assert first["answers"] == 2


def test_a_cell_counts_what_ran_with_both_runtimes_and_what_had_the_same_bits() -> None:
    loads = {"a": "same bits", "b": "verified", "c": "same bits"}
    document: dict[str, Any] = {
        "torches": {"2.11": "2.11.0+cu130"},
        "exports": {"2.11": {"a": "verified", "b": "verified", "d": "export: exit 5: no"}},
        "loads": {"2.11": {"cpp": {"2.11": loads}, "python": {"2.11": loads | {"c": "TorchVersionError: no"}}}},
    }
    assert torch_matrix.page(document) == (
        "| made by torch | exported | in 2.11 |\n| --- | --- | --- |\n| 2.11.0+cu130 | 2/3 | 2/3* |\n"
    )


def test_the_table_is_that_of_the_last_run_and_has_every_torch_that_exports() -> None:
    document = json.loads(torch_matrix.RESULTS.read_text())
    assert tuple(document["torches"]) == EXPORTING_TORCHES
    assert torch_matrix.page(document) in torch_matrix.DOCUMENT.read_text()
