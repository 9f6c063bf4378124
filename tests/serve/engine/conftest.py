"""Packages that the engine's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportkit.arr_coc import LIBRARIES
from exportkit.package.assemble import assemble
from exportkit.package.describe_library import describe_library
from tests.artifacts import artifact
from tests.fixtures import softpool_library
from tests.runtime import meeting
from tests.serve.engine import rows


@pytest.fixture(scope="session")
def meeting_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batched package whose operator waits for other calls of it, and raises if it is told to."""
    inputs = (torch.rand(4, 8), torch.rand(4, 8, 2))
    return meeting.write(tmp_path_factory.mktemp("meeting") / "meeting.pt2", [(inputs, meeting.answer(*inputs))])


@pytest.fixture(scope="session")
def rows_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of independent rows, of dtypes of every kind."""
    return rows.write(tmp_path_factory.mktemp("rows") / "rows.pt2", rows.example(3), rows.example(1))


@pytest.fixture(scope="session")
def misbehaving_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose operator crashes if it is told to."""
    library = softpool_library.misbehaving()
    path = tmp_path_factory.mktemp("misbehaving") / "softpool.pt2"
    assemble([artifact("softpool")], [(library, describe_library(library))], path)
    return path


@pytest.fixture(scope="session")
def arr_coc_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = LIBRARIES["cpu"]
    path = tmp_path_factory.mktemp("arr_coc") / "arr_coc.pt2"
    assemble([artifact("arr-coc")], [(library, describe_library(library))], path)
    return path
