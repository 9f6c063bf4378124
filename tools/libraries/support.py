"""What the models of libraries share: loading a library, fake kernels, and specs of models with a draw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from exportkit import ExportSpec

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def load(library: str, operator: str) -> None:
    """Loads a shared library below a folder of sys.path, if its operators are not there yet."""
    namespace, name = operator.split("::")
    if hasattr(getattr(torch.ops, namespace), name):
        return
    found = next((path for folder in sys.path if (path := Path(folder, library)).is_file()), None)
    if found is None:
        raise ModuleNotFoundError(f"{library} is below no folder of sys.path")
    torch.ops.load_library(found)


@cache  # torch takes a fake kernel once
def fake(operator: str, kernel: Callable[..., Any]) -> None:
    """Gives a fake kernel to an operator."""
    torch.library.register_fake(operator, kernel)


@cache
def fake_of_old(operator: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
    """Gives a fake kernel to an operator of the old registration, whose kernel is for every device, fake ones too."""
    operator.py_impl(torch._C.DispatchKey.Meta)(kernel)


def spec_of(
    make: Callable[[], nn.Module], draw: Callable[..., Arguments], sizes: Mapping[str, int], shapes: Any
) -> ExportSpec:
    """Makes a model, with the same weights each time, and draws its example inputs as `draw` draws all others."""
    torch.manual_seed(0)
    example, _ = draw(sizes, torch.Generator().manual_seed(0))
    return ExportSpec(model=make().eval(), example_inputs=example, dynamic_shapes=shapes, draw_inputs=draw)


def draw_rows(width: int, dtype: torch.dtype, sizes: Mapping[str, int], generator: torch.Generator) -> Arguments:
    """Draws a matrix of `n` rows."""
    return (torch.randn(sizes["n"], width, generator=generator).to(dtype),), {}
