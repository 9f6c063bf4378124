"""Fixtures of the verification tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exportkit.libraries import load_library
from tests.fixtures import stable_library
from tests.subprocesses import compiler_in_forkservers
from tests.verify.verify_artifacts import write_artifact

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / ".cache" / "verify"


@pytest.fixture(scope="module", autouse=True)  # for a package without __init__.py, pytest would never end it
def _children_have_torchs_compiler() -> Iterator[None]:
    """They also find the modules of this folder: one search path for all needs one template."""
    with pytest.MonkeyPatch.context() as patch, compiler_in_forkservers():
        patch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
        yield


@pytest.fixture
def artifact(tmp_path):
    """Writes an artifact into the test's folder."""
    return lambda *args, **kwargs: write_artifact(tmp_path / "affine.pt2", *args, **kwargs)


@pytest.fixture(scope="session")
def misbehaving_library() -> Path:
    """The operator misbehaving::act, built once for these sources and this torch, and loaded here for tracing."""
    library = stable_library.build(FOLDER / "misbehaving.cpp")
    load_library(library, defines=["misbehaving"])
    torch.library.register_fake("misbehaving::act", torch.empty_like, allow_override=True)
    return library
