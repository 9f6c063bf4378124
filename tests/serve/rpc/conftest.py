"""Fixtures of gRPC's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.rpc.echo import Served, serving


@pytest.fixture(scope="package")
def server(loop: asyncio.AbstractEventLoop, ticker_package: Path) -> Iterator[Served]:
    """A server of it."""
    with serving(loop, ticker_package) as opened:
        yield opened
