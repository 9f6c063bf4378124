"""Fixtures of servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.operations.server_processes import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts servers."""
    launcher = Launcher(tmp_path_factory.mktemp("servers"))
    yield launcher
    launcher.close()
