"""Loads the built operator libraries into the process."""

from __future__ import annotations

import torch

from exportkit.arr_coc import LIBRARIES, LIBRARY_DIR
from exportkit.errors import HostError
from exportkit.libraries import load_library

NAMESPACE = "arr_coc"


def load_libraries() -> None:
    """Loads libarr_coc_cpu.so, and libarr_coc_cuda.so if torch has CUDA.

    Raises:
        HostError: The libraries were never built.
    """
    if "cpu" not in LIBRARIES:
        raise HostError(
            f"the operator library is not built: {LIBRARY_DIR} has no libarr_coc_cpu.so",
            hint="Run `pip install --no-build-isolation -e .` (or `make setup`) with a C++ compiler.",
        )
    load_library(LIBRARIES["cpu"], defines=[NAMESPACE])
    if "cuda" in LIBRARIES and torch.version.cuda is not None:
        load_library(LIBRARIES["cuda"], defines=())
