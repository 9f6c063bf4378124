"""Sees whether shared memory is read and written in the event loop's thread, where other requests wait meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from exportkit.serve.protocol.shared_memory import SharedMemory


def off_the_loop(monkeypatch: pytest.MonkeyPatch, *methods: str) -> dict[str, bool]:
    """Returns a dict that gets an entry for each method that is called: whether no event loop runs in its thread."""
    seen: dict[str, bool] = {}

    def noted(name: str) -> Any:
        method = getattr(SharedMemory, name)

        def note(*arguments: Any) -> Any:
            seen[name] = asyncio._get_running_loop() is None
            return method(*arguments)

        return note

    for name in methods:
        monkeypatch.setattr(SharedMemory, name, noted(name))
    return seen
