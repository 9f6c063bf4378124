"""A tritonserver that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.triton_backend.triton_server import Triton


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A server without models, that has crashed in no test."""
    server = Triton(tmp_path_factory.mktemp("triton"))
    try:
        yield server
        assert server.process.poll() is None, server.log[-3000:]
    finally:
        server.close()
    assert "AddressSanitizer" not in server.log, server.log[-8000:]
