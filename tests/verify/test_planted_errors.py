"""Errors that are planted in a model are seen, and what is right passes, in every precision."""

from __future__ import annotations

import re

import pytest
import torch

from tools.planted_errors import DOCUMENT, DTYPES, PLANTED, Planted, judged


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.what)
def test_it_is_judged_as_the_document_says(planted: Planted, dtype: torch.dtype) -> None:
    agrees = judged(planted, dtype).agrees
    if planted.gross is not False:
        assert agrees is (planted.gross is None)
    row = re.search(rf"^\| {re.escape(planted.what)} \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert row
    said = row[1].split(" | ")[DTYPES.index(dtype)]
    assert said.startswith("passes" if agrees else "**seen**")
