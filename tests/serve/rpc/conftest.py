"""Fixtures of gRPC's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.engine import ticker
from tests.serve.rpc.echo import Served, serving


@pytest.fixture(scope="package")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with state."""
    return ticker.write(tmp_path_factory.mktemp("ticker") / "ticker.pt2")


@pytest.fixture(scope="package")
def server(loop: asyncio.AbstractEventLoop, package: Path) -> Iterator[Served]:
    """A server of it."""
    with serving(loop, package) as opened:
        yield opened
