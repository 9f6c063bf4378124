"""Runs a model without exportkit's operators: each is replaced by its ATen reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exportkit.arr_coc.ops import SPECS


class References:
    """A context in which modules that imported an operator's wrapper call its reference.

    Create it after the model is imported. Entering it is cheap, so single timed calls can use references. Operators
    that a model calls through torch.ops are not replaced; `NoOperators` finds them.
    """

    def __init__(self) -> None:
        references = {id(spec.wrapper): (spec.wrapper, spec.reference) for spec in SPECS.values()}
        self._places: list[tuple[ModuleType, str, Any, Any]] = [
            (module, name, *references[id(value)])
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType) and not module.__name__.startswith("exportkit.arr_coc.ops")
            for name, value in list(vars(module).items())
            if id(value) in references
        ]

    def __enter__(self) -> None:
        for module, name, _, reference in self._places:
            setattr(module, name, reference)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, name, wrapper, _ in self._places:
            setattr(module, name, wrapper)


class OperatorCalled(Exception):
    """One of exportkit's operators ran inside `NoOperators`."""


class NoOperators(TorchDispatchMode):
    """Raises OperatorCalled if one of exportkit's operators is called, which a model on references never does."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs other operators."""
        if func.namespace == "arr_coc":
            raise OperatorCalled(func.name())
        return func(*args, **(kwargs or {}))
