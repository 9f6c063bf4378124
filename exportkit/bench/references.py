"""Runs a model without the operators that installed packages describe: each is replaced by its reference."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exportkit.installed import DescribedOperator


class WithReferences:
    """A context in which modules that imported an operator's wrapper call its reference.

    Create it after the model is imported. Entering it is cheap, so single timed calls can use references. Operators
    that a model calls through torch.ops are not replaced; `NoOperators` finds them.
    """

    def __init__(self, operators: Iterable[DescribedOperator]) -> None:
        references = {id(spec.wrapper): (spec.wrapper, spec.reference) for spec in operators}
        modules = {wrapper.__module__ for wrapper, _ in references.values()}
        library = {module.rpartition(".")[0] or module for module in modules}  # its own calls stay as they are
        self._places: list[tuple[ModuleType, str, Any, Any]] = [
            (module, name, *references[id(value)])
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            and not any(f"{module.__name__}.".startswith(f"{package}.") for package in library)
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


class OperatorCalledError(Exception):
    """An operator ran inside `NoOperators`."""


class NoOperators(TorchDispatchMode):
    """Raises OperatorCalledError if an operator of a namespace is called, which a model on references never does."""

    def __init__(self, namespaces: Collection[str]) -> None:
        super().__init__()
        self._namespaces = namespaces

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs other operators."""
        if func.namespace in self._namespaces:
            raise OperatorCalledError(func.name())
        return func(*args, **(kwargs or {}))
