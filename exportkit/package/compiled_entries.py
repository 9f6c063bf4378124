"""The folders of the cache (exportkit.runtime.cache) in which exports keep what they compile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exportkit.package import core


@contextmanager
def compiled_entry(sha256: str) -> Iterator[Path]:
    """Yields the folder of an entry, which an export fills. Nobody removes it meanwhile.

    Args:
        sha256: The 64 digits of the digest of all that the code depends on.

    Raises:
        OSError: The cache cannot be used.
    """
    library, entry = core.library(), core.handle("ek_compiled_entry", core.encoded(sha256))
    try:
        yield Path(os.fsdecode(library.ek_entry_folder(entry)))
    finally:
        library.ek_entry_close(entry)


def limit_compiled(max_bytes: int) -> None:
    """Removes the least recently used entries until the rest takes at most so much.

    Raises:
        CacheError: Another user could change the cache. Nothing was removed.
    """
    core.call("ek_limit_compiled", max_bytes)
