"""A call such as ARR-COC's."""

from __future__ import annotations

from typing import Any

import msgspec

from exportkit.package import manifest as m


def region_call(**changes: Any) -> m.Call:
    """A call such as ARR-COC's, with some of its keys changed."""
    batch, rows, columns = (m.Size(dimension=name, scale=scale) for name, scale in (("b", 1), ("gh", 14), ("gw", 14)))
    tolerance = m.OutputTolerance(rtol=0, atol=0)
    sizes = {
        "features": ("float32", (batch, None, 8)),
        "indices": ("int64", (batch, None)),
        "budgets": ("int64", (batch, None)),
        "scores": ("float32", (batch, None)),
        "relevance": ("float32", (batch, None)),
    }
    outputs = tuple(
        m.TensorOutput(name=name, dtype=dtype, shape=shape, tolerance=tolerance)
        for name, (dtype, shape) in sizes.items()
    )
    inputs = (
        m.TensorInput(name="picture", dtype="float32", shape=(batch, 3, rows, columns), written=None),
        m.TensorInput(name="wanted", dtype="float32", shape=(batch, 8), written=None),
    )
    call = m.Call(
        parameters=tuple(
            m.Parameter(name=each.name, kind="positional", value=m.TensorNode(index=index))
            for index, each in enumerate(inputs)
        ),
        inputs=inputs,
        result=m.MappingNode(keys=tuple(sizes), items=tuple(m.TensorNode(index=index) for index in range(len(sizes)))),
        outputs=outputs,
        dimensions=tuple(m.Dimension(name=name, min=1, max=64) for name in ("b", "gh", "gw")),
    )
    return msgspec.structs.replace(call, **changes)
