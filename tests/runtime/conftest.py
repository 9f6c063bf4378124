"""Models and settings that the runtime's tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exportkit.runtime.native import library_path
from tests.runtime import c_interface, exportkit_run, tiny, ways
from tests.runtime.caches import Cache


@pytest.fixture(scope="module", params=["cpp", "python"])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C++ runtime and torch's own binding, in turn: EXPORTKIT_RUNTIME says which one runs compiled code."""
    if request.param == "cpp":
        exportkit_run.require_built()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPORTKIT_RUNTIME", request.param)
        yield request.param


@pytest.fixture(scope="session")
def c_library() -> c_interface.Library:
    """The C interface."""
    exportkit_run.require_built()
    return c_interface.Library(str(library_path()))


@pytest.fixture(scope="module")
def c_model(c_library: c_interface.Library, tiny_package: Path) -> Iterator[c_interface.Model]:
    """The small package, opened through the C interface."""
    with c_library.open(tiny_package) as opened:
        yield opened


@pytest.fixture(scope="module", params=ways.PYTHON)
def recorder(request: pytest.FixtureRequest, recorder_package: Path) -> Iterator[Any]:
    """The package with state by each of Python's ways."""
    yield from ways.opened(request, recorder_package)


@pytest.fixture(scope="module", params=ways.EVERY)
def every_recorder(request: pytest.FixtureRequest, recorder_package: Path) -> Iterator[Any]:
    """The package with state by each of Python's ways, and through the C interface: for what all of them promise."""
    yield from ways.opened(request, recorder_package)


@pytest.fixture
def arrays() -> list[np.ndarray]:
    """Inputs of the small package."""
    args, kwargs = tiny.example(2, 3)
    return [tensor.numpy() for tensor in (args[0], args[1]["features"], kwargs["offset"])]


@pytest.fixture
def cache() -> Cache:
    """The cache, under a clock that the test sets."""
    return Cache()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, and nothing else does."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test finds what another unpacked, nor touches the user's cache."""
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "exportkit-cache"))
