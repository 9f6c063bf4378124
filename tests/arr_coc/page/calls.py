"""A call such as ARR-COC's."""

from __future__ import annotations

from typing import Any

import msgspec

from exportkit.package import manifest as m
from tests.runtime import tiny

BATCH = m.Size(dimension="b")
OUTPUTS = {
    "features": ("float32", (BATCH, None, 8)),
    "indices": ("int64", (BATCH, None)),
    "budgets": ("int64", (BATCH, None)),
    "scores": ("float32", (BATCH, None)),
    "relevance": ("float32", (BATCH, None)),
}


def region_call(**changes: Any) -> m.Call:
    """A call such as ARR-COC's, with some of its keys changed."""
    rows, columns = (m.Size(dimension=name, scale=14) for name in ("gh", "gw"))
    inputs = {"picture": ("float32", (BATCH, 3, rows, columns)), "wanted": ("float32", (BATCH, 8))}
    call = tiny.tensors_call(inputs, OUTPUTS, b=(1, 64), gh=(1, 64), gw=(1, 64))
    return msgspec.structs.replace(call, **changes)
