"""Errors that are injected in a model are seen, and what is right passes, in every precision."""

from __future__ import annotations

import re

import pytest
import torch

from tools.injected_errors import DOCUMENT, DTYPES, INJECTED, Injected, judged


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("injected", INJECTED, ids=lambda injected: injected.what)
def test_it_is_judged_as_the_document_says(injected: Injected, dtype: torch.dtype) -> None:
    agrees = judged(injected, dtype).agrees
    if injected.gross is not False:
        assert agrees is (injected.gross is None)
    row = re.search(rf"^\| {re.escape(injected.what)} \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert row
    said = row[1].split(" | ")[DTYPES.index(dtype)]
    assert said.startswith("passes" if agrees else "**seen**")
