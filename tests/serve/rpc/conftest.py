"""Fixtures of gRPC's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.serve.engine import ticker
from tests.serve.rpc.echo import Served, loop_thread, served, serving


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of every server, in a thread: grpc.aio has one loop in a process."""
    with loop_thread() as loop:
        yield loop


@pytest.fixture
def echo(loop: asyncio.AbstractEventLoop) -> Iterator[Served]:
    """A server of one echo model."""
    with served(loop) as opened:
        yield opened


@pytest.fixture
def channel(echo: Served) -> Iterator[grpc.Channel]:
    """A connection to it."""
    with grpc.insecure_channel(echo.address, [("grpc.max_receive_message_length", -1)]) as channel:
        yield channel


@pytest.fixture(scope="package")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with state."""
    return ticker.write(tmp_path_factory.mktemp("ticker") / "ticker.pt2")


@pytest.fixture(scope="package")
def server(loop: asyncio.AbstractEventLoop, package: Path) -> Iterator[Served]:
    """A server of it."""
    with serving(loop, package) as opened:
        yield opened
