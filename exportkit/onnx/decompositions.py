"""Finds the decomposition of a custom operator: a function that computes the same with torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from exportkit.errors import ExportError
from exportkit.export.trace.preflight import qualified_name
from exportkit.installed import described_operators

Decomposition = Callable[..., Any]


def decomposition_of(operator: OpOverload, given: Mapping[str, Decomposition]) -> Decomposition:
    """Returns the decomposition of an operator.

    Args:
        operator: A custom operator.
        given: The caller's decompositions by the operator's name. They come before those of installed packages.

    Raises:
        ExportError: The operator has none.
    """
    name = qualified_name(operator)
    if name in given:
        return given[name]
    if (described := described_operators([name]).get(name)) is not None:
        return described.decomposition or described.reference
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return operator.decompose
    raise ExportError(
        f"operator {name} has no decomposition, so ONNX cannot compute it",
        hint=f"Give a function with its parameters that computes the same with torch's operators: "
        f"--decomposition {name}=package.module:function, or ExportSpec(decompositions={{{name!r}: function}}).",
    )
