from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from exportkit.serve.protocol.shared_memory import SharedMemory


@pytest.fixture
def shared_file() -> Iterator[Path]:
    """A file of 4096 bytes in /dev/shm that nobody else uses."""
    path = Path("/dev/shm") / f"exportkit-{uuid.uuid4().hex}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def region(shared_file: Path) -> Iterator[SharedMemory]:
    """Shared memory in which `r` is the second half of `shared_file`."""
    memory = SharedMemory()
    memory.register("r", f"/{shared_file.name}", 2048, 2048)
    yield memory
    memory.close()
