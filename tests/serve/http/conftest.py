"""A server that all tests of this folder share, and applications for single requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.shared_memory import SharedMemory
from tests.serve.http import ways
from tests.serve.http.doubles import FakeModel, FakeRepository, break_down
from tests.serve.http.ways import make_app
from tests.serve.page.in_thread import Site, served
from tests.serve.receiving.loopback import LoopbackApp

LARGEST = 32 << 20


def repository() -> FakeRepository:
    return FakeRepository(
        FakeModel("echo", {"x": ("FP32", [-1])}, LARGEST),
        FakeModel("small", {"x": ("UINT8", [-1])}, 1000),
        FakeModel("broken down", {"x": ("FP32", [-1])}, 1000, break_down),
    )


@pytest.fixture(scope="session", autouse=True, params=["alone", "receiver"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether the process that has the models speaks HTTP, or a receiver for it. What clients see is the same."""
    with ways.chosen(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _meets_a_receiver(way: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that runs a second time for receivers asks one. Otherwise it would be the first time again."""
    before = LoopbackApp.calls
    yield
    asked = LoopbackApp.calls > before or "site" in request.fixturenames
    assert asked or way == "alone", "this test asks no receiver: mark it with ALONE"


@pytest.fixture
def models() -> FakeRepository:
    return repository()


@pytest.fixture
def app(models: FakeRepository) -> Any:
    return make_app(models, HttpOptions())


@pytest.fixture(scope="session")
def site(way: str) -> Iterator[Site]:
    """A server without shared memory."""
    with served(make_app(repository(), HttpOptions())) as site:
        yield site


@pytest.fixture(scope="session")
def sharing_site(way: str) -> Iterator[Site]:
    """A server with shared memory, which a receiver does not offer."""
    with served(make_app(repository(), HttpOptions(shared_memory=SharedMemory()))) as site:
        yield site
