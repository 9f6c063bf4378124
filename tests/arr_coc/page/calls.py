"""A call such as ARR-COC's."""

from __future__ import annotations

from typing import Any

import msgspec

from exportkit.package import manifest as m
from tests.runtime import tiny


def region_call(**changes: Any) -> m.Call:
    """A call such as ARR-COC's, with some of its keys changed."""
    batch, rows, columns = (m.Size(dimension=name, scale=scale) for name, scale in (("b", 1), ("gh", 14), ("gw", 14)))
    inputs = {"picture": ("float32", (batch, 3, rows, columns)), "wanted": ("float32", (batch, 8))}
    outputs = {
        "features": ("float32", (batch, None, 8)),
        "indices": ("int64", (batch, None)),
        "budgets": ("int64", (batch, None)),
        "scores": ("float32", (batch, None)),
        "relevance": ("float32", (batch, None)),
    }
    call = tiny.tensors_call(inputs, outputs, b=(1, 64), gh=(1, 64), gw=(1, 64))
    return msgspec.structs.replace(call, **changes)
