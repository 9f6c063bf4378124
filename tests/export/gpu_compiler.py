"""What compiles code for GPUs: a CUDA build of torch with Triton, and CUDA's headers. No GPU is needed."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from exportkit.errors import CompilerError
from exportkit.export.compile.compile_absent import cuda_home


def require() -> None:
    """Skips the test where it is missing, as in a CPU build of torch. With EXPORTKIT_REQUIRE_CUDA=1 the test fails."""
    reason = _missing()
    if reason is not None:
        (pytest.fail if os.environ.get("EXPORTKIT_REQUIRE_CUDA") == "1" else pytest.skip)(reason)


def _missing() -> str | None:
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return f"torch {torch.__version__} has no Triton: a CUDA build does, and needs no GPU"
    try:
        cuda_home()
    except CompilerError as error:
        return str(error)
    return None
