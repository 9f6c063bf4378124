"""Finds what installed packages declare for exportkit: operators, models, commands, benchmarks, parts of the page.

A package declares them as entry points (https://packaging.python.org/specifications/entry-points/):

- `exportkit.operators`: a namespace of operators -> a module. Importing the module registers the operators with their
  fakes and gradients; a module that is cheap to import has a function `register` that does. The module may have
  `LIBRARIES`, the shared libraries by device: that for "cpu" defines the operators, that for "cuda" adds kernels. What
  `register` returns, or else `SPECS`, describes the operators by name: objects with the attributes of an OpSpec
  (`wrapper`, `reference`, `decomposition`).
- `exportkit.models`: a name for MODEL -> `module:attribute`, as MODEL may be written itself.
  `verify` and others make it with the arguments that a package recorded. A stranger may have written these numbers and
  texts: a callable must not execute or unpickle what they name.
- `exportkit.commands`: a command of `exportkit` -> `module:command`, made with `exportkit.cli.app.command`.
- `exportkit.bench`: a name -> a module that times operators (exportkit/bench/operator_options.py says what it has).
- `exportkit.pages`: a name -> a module with a part of the server's page (exportkit/serve/page/page_routes.py).

What is imported here was installed by the user. A package file can only say which operators and which model it wants.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from exportkit.errors import LibraryLoadError

_OPERATORS, _MODELS = "exportkit.operators", "exportkit.models"
_OWN = (EntryPoint("exportkit_recurrent", "exportkit.recurrent", _OPERATORS),)  # exportkit's: part of no plugin


class DescribedOperator(Protocol):
    """An operator that computes the same as a function of torch's own operators.

    Attributes:
        wrapper: The public function, which calls the operator.
        reference: The same function in torch's operators.
        decomposition: Returns what the operator itself returns, where the wrapper returns a part of it; else None.
    """

    wrapper: Callable[..., Any]
    reference: Callable[..., Any]
    decomposition: Callable[..., Any] | None


def declared(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group by name."""
    own = [entry for entry in _OWN if entry.group == group]
    return {entry.name: entry for entry in (*own, *entry_points(group=group))}


def installed_models() -> dict[str, str]:
    """Returns the names that MODEL may be, and what each stands for: `package.module:attribute`."""
    return {name: entry.value for name, entry in declared(_MODELS).items()}


def operator_namespaces() -> list[str]:
    """Returns the namespaces that installed packages declare."""
    return sorted(declared(_OPERATORS))


def declared_modules() -> list[str]:
    """Returns the modules that packages declare for operators and models."""
    return sorted({entry.module for group in (_OPERATORS, _MODELS) for entry in declared(group).values()})


def declared_module(namespace: str) -> str:
    """Returns the name of the module that a package declares for a namespace."""
    return declared(_OPERATORS)[namespace].module


def register_operators(names: Iterable[str]) -> None:
    """Registers the given operators, such as "myops::scale.default", with fakes and gradients.

    Only those whose namespaces an installed package declares. LibraryLoadError: the declared module cannot be imported.
    """
    for namespace in _namespaces(names):
        _registered(namespace)


def described_operators(names: Iterable[str]) -> dict[str, DescribedOperator]:
    """Registers the given operators, and returns the described ones of their namespaces, by `namespace::name`."""
    found: dict[str, DescribedOperator] = {}
    for namespace in _namespaces(names):
        found |= {f"{namespace}::{name}": spec for name, spec in _registered(namespace).items()}
    return found


def installed_libraries(names: Iterable[str], devices: Collection[str]) -> list[Path]:
    """Returns the shared libraries of the given operators that installed packages declare for "cpu" or "cuda".

    The library for the CPU defines the operators, so it always comes first. Errors are those of `register_operators`.
    """
    return [
        Path(path)
        for namespace in _namespaces(names)
        for device, path in libraries_of(namespace).items()
        if device in {"cpu", *devices}
    ]


def libraries_of(namespace: str) -> Mapping[str, Path]:
    """Returns the shared libraries of a declared namespace, by device; an empty mapping if its module names none."""
    return cast("Mapping[str, Path]", getattr(_module(namespace), "LIBRARIES", {}))


def _namespaces(names: Iterable[str]) -> list[str]:
    wanted = {name.partition("::")[0] for name in names}
    return [namespace for namespace in operator_namespaces() if namespace in wanted]


def _registered(namespace: str) -> Mapping[str, DescribedOperator]:
    module = _module(namespace)
    register = getattr(module, "register", None)
    return register() if register is not None else getattr(module, "SPECS", {})


def _module(namespace: str) -> ModuleType:
    name = declared_module(namespace)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LibraryLoadError(
            f"{name}, which an installed package declares for the operators {namespace}::*, cannot be "
            f"imported: {error}",
            hint="Mend that package or uninstall it.",
        ) from error
