"""Lets torch.onnx make its table of translations once for many conversions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.onnx._internal.exporter._registration import ONNXRegistry

from exportkit.export.torch_internals import replaced


@contextmanager
def one_registry() -> Iterator[None]:
    """Gives every conversion in the block a copy of one table: making it takes longer than a small function does."""
    made: dict[object, ONNXRegistry] = {}

    def keeping(from_torchlib: Any) -> Any:
        def copied(cls: type[ONNXRegistry], **options: Any) -> ONNXRegistry:
            key = tuple(sorted(options.items()))
            if key not in made:
                made[key] = from_torchlib.__func__(cls, **options)
            registry = copy.copy(made[key])
            registry.functions = {operator: list(functions) for operator, functions in registry.functions.items()}
            return registry

        return classmethod(copied)

    with replaced(ONNXRegistry, "from_torchlib", keeping):
        yield
