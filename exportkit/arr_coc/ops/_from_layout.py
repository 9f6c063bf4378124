"""What follows from an operator's layout: its fake kernel, and the shapes in its description."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from exportkit.operators.contract.operator_spec import OpSpec


def register_fake(spec: OpSpec) -> None:
    """Registers the fake kernel, which torch.export and torch.compile call with tensors that have no data."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        return spec.layout.fake(spec.name, spec.arguments(args, kwargs))

    torch.library.register_fake(f"{spec.namespace}::{spec.name}", fake)


def add_shapes(spec: OpSpec) -> None:
    """Adds the layout to the wrapper's description, where `help` shows it."""
    description = inspect.cleandoc(spec.wrapper.__doc__ or "")
    spec.wrapper.__doc__ = f"{description}\n\nShapes:\n    {spec.layout.describe()}\n"
