"""The matrix of torches: what is replayed, and the table."""

from __future__ import annotations

import json
from pathlib import Path

from exportkit.support import EXPORTING_TORCHES
from tools import torch_matrix
from tools.torch_replay import replay


def test_a_replay_counts_the_answers_and_has_the_same_bits_again(tiny_package: Path) -> None:
    first = replay(str(tiny_package))
    assert first == replay(str(tiny_package))
    assert first["answers"] == 2


def test_the_table_is_that_of_the_last_run_and_has_every_torch_that_exports() -> None:
    document = json.loads(torch_matrix.RESULTS.read_text())
    assert tuple(document["torches"]) == EXPORTING_TORCHES
    assert torch_matrix.page(document) in torch_matrix.DOCUMENT.read_text()
