"""The operator libraries that were built here, for the tests that look at what is in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from exportkit.arr_coc import LIBRARIES

CHECKED = Path(__file__).parents[1] / "build" / "release" / "cuda-check" / "libarr_coc_cuda.so"


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
