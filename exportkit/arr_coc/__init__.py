"""ARR-COC: operators, the model that picks the patches of an image that matter for a query, its demo and its bench.

A plugin: exportkit finds it through the entry points of its distribution, like anybody's operators and models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exportkit.operators.contract.operator_spec import OpSpec

LIBRARY_DIR = Path(__file__).parent / "lib"  # the build writes the operator libraries here

LIBRARIES = {device: path for device in ("cpu", "cuda") if (path := LIBRARY_DIR / f"libarr_coc_{device}.so").exists()}
"""The operator libraries that were built, by device."""


def register() -> Mapping[str, OpSpec]:
    """Registers the operators `arr_coc::*` with fakes and gradients, and returns their specs by name.

    Raises:
        HostError: The libraries were never built.
    """
    from exportkit.arr_coc.ops import SPECS

    return SPECS
