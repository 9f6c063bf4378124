"""What the module of an operator is made of: the function that users call, and the promises."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

# Imported by name, because after other work has emptied the caches, an attribute lookup takes most of a microsecond.
from torch import Tensor, is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd
from torch.compiler import is_dynamo_compiling

from exportkit.operators.contract.layout import Layout, check
from exportkit.operators.contract.operator_spec import OpSpec, Refusal
from exportkit.operators.contract.sample import Sample

__all__ = [
    "ArrCocSpec",
    "Layout",
    "OpSpec",
    "Refusal",
    "Sample",
    "check",
    "normals",
    "operator",
    "operator_like",
    "specs_in",
    "statically_known_true",
]

P = ParamSpec("P")
R = TypeVar("R")


def operator(name: str, namespace: str = "arr_coc") -> Callable[..., Any]:
    """Returns `<namespace>::<name>` as a function that skips autograd rules where gradients are off.

    torch runs an autograd rule registered from Python even if it has nothing to do. That costs 4 to 10 us per call, and
    the output lives longer, so that the next output gets other, cold memory. torch.compile traces the plain call.
    """
    overload = getattr(getattr(torch.ops, namespace), name).default
    dispatch = overload._op  # the same as calling `overload`, without a Python frame

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_grad_enabled() or is_dynamo_compiling():
            return overload(*args, **kwargs)
        with _AutoDispatchBelowAutograd():
            return dispatch(*args, **kwargs)

    return call


def operator_like(reference: Callable[P, R]) -> Callable[P, R]:
    """Returns `arr_coc::<name>` as a function with the parameters and the description of `<name>_reference`."""
    name = reference.__name__.removesuffix("_reference")
    call = functools.wraps(reference)(operator(name))
    call.__name__ = call.__qualname__ = name
    return call


@dataclass(frozen=True, kw_only=True)
class ArrCocSpec(OpSpec):
    """The promises of the operator in the namespace arr_coc that its wrapper is named after."""

    namespace: str = "arr_coc"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.wrapper.__name__)


def normals(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Returns a function that draws normally distributed tensors: `normal(2, 3)` or `normal(2, 3, scale=20)`."""
    return lambda *shape, scale=1.0: (torch.randn(shape, device=device) * scale).to(dtype)


def statically_known_true(condition: bool | torch.SymBool) -> bool:
    """Tells whether a condition on sizes holds for all sizes that there may be, without a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes  # imported late: it takes a third of a second

    return symbolic_shapes.statically_known_true(condition)


def specs_in(package: str, path: Iterable[str]) -> dict[str, OpSpec]:
    """Imports a package's modules whose names start with no underscore, and returns their SPECs by name."""
    found: dict[str, OpSpec] = {}
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_") and not module.ispkg:
            values = vars(importlib.import_module(f"{package}.{module.name}")).values()
            found |= {spec.name: spec for spec in values if isinstance(spec, OpSpec)}
    return found


def register_fake(spec: OpSpec) -> None:
    """Registers the fake kernel, which torch.export and torch.compile call with tensors that have no data."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        return spec.layout.fake(spec.name, spec.arguments(args, kwargs))

    torch.library.register_fake(f"{spec.namespace}::{spec.name}", fake)


def add_shapes(spec: OpSpec) -> None:
    """Adds the layout to the wrapper's description, where `help` shows it."""
    description = inspect.cleandoc(spec.wrapper.__doc__ or "")
    spec.wrapper.__doc__ = f"{description}\n\nShapes:\n    {spec.layout.describe()}\n"
