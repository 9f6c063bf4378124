"""What the tests of the examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import paged_package
from tests.serve.page.conftest import browser, launch

__all__ = ["browser", "launch"]


@pytest.fixture(scope="session")
def paged_folder() -> Path:
    """examples/paged_cache, built."""
    return paged_package.built_package()


@pytest.fixture
def on_path(paged_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same; `paged_cache` can be imported."""
    monkeypatch.syspath_prepend(str(paged_folder))
    return paged_folder
