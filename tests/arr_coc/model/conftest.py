"""What the tests of the model share."""

from __future__ import annotations

import dataclasses

import pytest

from exportkit.arr_coc.model import encoder


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets "vit-tiny" have two blocks: the other ten would do nothing new, and drawing their weights takes a second."""
    monkeypatch.setitem(encoder.SIZES, "tiny", dataclasses.replace(encoder.SIZES["tiny"], depth=2))
