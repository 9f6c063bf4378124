"""What the tests of the examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import example_packages, paged_package
from tests.runtime import exportkit_run


@pytest.fixture(scope="session")
def paged_folder() -> Path:
    """examples/paged_cache, built."""
    return paged_package.built_package()


@pytest.fixture
def on_path(paged_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same; `paged_cache` can be imported."""
    monkeypatch.syspath_prepend(str(paged_folder))
    return paged_folder


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/llm/generate.cpp, built by its CMakeLists.txt."""
    return (
        exportkit_run.build_example(example_packages.EXAMPLES / "llm", tmp_path_factory.mktemp("generate")) / "generate"
    )
