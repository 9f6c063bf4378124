"""Children of the code under test that find torch's compiler imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from exportkit.child import process

# As in tests/fresh_child.py: NVML says whether there is a GPU, and forks can use CUDA.
_COMPILER = "import os; os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'; import torch._inductor.compile_fx; "


@contextmanager
def compiler_in_templates() -> Iterator[None]:
    """Lets templates import what fake tensors and programs need, which takes each of their children a second."""
    plain = process._first_code

    def first_code(connection: int, conditions: Any) -> str:
        before, ours = plain(connection, conditions).split("from exportkit", 1)
        return f"{before}{_COMPILER if conditions.torch else ''}from exportkit{ours}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_templates", {})
        patch.setattr(process, "_first_code", first_code)
        yield
        for template in process._templates.values():
            template.retire()
