"""A model as it would be without our operators: each replaced by its ATen reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exportkit.ops import SPECS


class References:
    """While it is entered, modules that imported an operator's wrapper call its reference.

    Made once the model is imported; entering it again and again is cheap, so that a timed call can be switched to
    references and the next one back. Operators that a model calls through torch.ops stay what they are:
    `NoOperators` finds them.
    """

    def __init__(self) -> None:
        references = {id(spec.wrapper): (spec.wrapper, spec.reference) for spec in SPECS.values()}
        self._places: list[tuple[ModuleType, str, Any, Any]] = [
            (module, name, *references[id(value)])
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType) and not module.__name__.startswith("exportkit.ops")
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
    """One of our operators ran inside of `NoOperators`."""


class NoOperators(TorchDispatchMode):
    """Raises OperatorCalled where one of our operators is called: a model on references calls none."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs what is none of ours."""
        if func.namespace == "arr_coc":
            raise OperatorCalled(func.name())
        return func(*args, **(kwargs or {}))
