"""What tests share is made once, whichever of pytest's workers asks first."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_maker(path: Path) -> Iterator[bool]:
    """Whether the caller must make `path`. Others wait until it has; a maker that dies lets the next one try."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not path.exists()
