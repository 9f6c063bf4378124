"""Lets torch.onnx make its table of translations once for many conversions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from exportkit.export.torch_internals import replaced


@contextmanager
def one_registry() -> Iterator[None]:
    """Gives every conversion in the block a copy of one table: making it takes longer than a small function does."""

    def keeping(from_torchlib: Any) -> Any:
        def copied(cls: type[ONNXRegistry], **options: Any) -> ONNXRegistry:
            registry = copy.copy(_made(from_torchlib.__get__(None, cls), _number_of_operators(), **options))
            registry.functions = {operator: list(functions) for operator, functions in registry.functions.items()}
            return registry

        return classmethod(copied)

    with replaced(ONNXRegistry, "from_torchlib", keeping):
        yield


@functools.lru_cache(maxsize=2)
def _made(make: Callable[..., ONNXRegistry], operators: int, **options: Any) -> ONNXRegistry:
    """Makes a table. It lacks the operators that come later, such as torchvision's when it is imported."""
    return make(**options)


def _number_of_operators() -> int:
    return len(torch._C._dispatch_get_all_op_names())
