"""Fake kernels from layouts: what torch.export and torch.compile call with tensors that have no data."""

from __future__ import annotations

from typing import Any

import torch

from exportkit.contract.operator_spec import OpSpec


def register_fake(spec: OpSpec) -> None:
    """Registers the fake that the operator's layout describes."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        return spec.layout.fake(spec.name, spec.arguments(args, kwargs))

    torch.library.register_fake(f"{spec.namespace}::{spec.name}", fake)
