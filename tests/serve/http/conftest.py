"""A server that all tests of this folder share, and applications for single requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from tests.serve.http.doubles import FakeModel, FakeRepository, break_down
from tests.serve.page.in_thread import Site, served

LARGEST = 32 << 20


def repository() -> FakeRepository:
    return FakeRepository(
        FakeModel("echo", {"x": ("FP32", [-1])}, LARGEST),
        FakeModel("small", {"x": ("UINT8", [-1])}, 1000),
        FakeModel("broken down", {"x": ("FP32", [-1])}, 1000, break_down),
    )


@pytest.fixture
def models() -> FakeRepository:
    return repository()


@pytest.fixture
def app(models: FakeRepository) -> Any:
    return make_app(models, HttpOptions())


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A server."""
    with served(make_app(repository(), HttpOptions())) as site:
        yield site
