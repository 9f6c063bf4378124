"""What `exportkit ops new` writes, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators.scaffold import scaffolded


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package with an operator of each kind."""
    return scaffolded.built_package(tmp_path_factory.mktemp("package"))
