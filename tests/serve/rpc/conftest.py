"""Fixtures of gRPC's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.serve.rpc.serving_echo import Served, loop_thread, served


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
