"""Fixtures of servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.operations.server_processes import Launcher


@pytest.fixture(scope="session", params=[(), ("--receivers", "2")], ids=["alone", "receivers"])
def launcher(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts servers: a process alone, and one with receivers, which keeps every promise too."""
    launcher = Launcher(tmp_path_factory.mktemp("servers"), request.param)
    yield launcher
    launcher.close()
