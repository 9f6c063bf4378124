"""The libraries that were built here, for the tests that look at what is in them or build more of them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exportkit.arr_coc import LIBRARIES

BUILD = Path(__file__).parents[1] / "build"
CHECKED = BUILD / "release" / "cuda-check" / "libarr_coc_cuda.so"


@contextmanager
def builds_alone() -> Iterator[None]:
    """For tests that run setup.py: two builds at a time would write to the same files of the build folder."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def operator_library(device: str) -> Path:
    """Our operators for this device: the installed library, or else the one that was only compiled.

    Where nvcc is, `make test` compiles the CUDA library, so that a missing one is a failure there and a skip elsewhere.
    """
    library = LIBRARIES.get(device, CHECKED if device == "cuda" else None)
    if library is not None and library.exists():
        return library
    missing = f"the {device} library was not built"
    if device == "cpu" or (os.environ.get("EXPORTKIT_CUDA") in ("1", "check") and shutil.which("nvcc")):
        pytest.fail(missing)
    pytest.skip(missing)
