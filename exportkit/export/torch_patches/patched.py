"""Replaces private functions of torch while a block runs: the one door through which export does so.

What may be replaced stands in the table (`patch_table.py`), with the reason. Without `replaced`, these change torch:
`quiet_torch` adds an attribute to errors, so that torch.export prints no half-traced graph, and `opaque` and
`hop_subgraphs` register kernels and effects for a while.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from exportkit.errors import ExportError
from exportkit.export.torch_patches.patch_table import ANY, PATCHES, Patch
from exportkit.support import exporting_torches

DOOR = __file__  # between a replacement and its caller, in stacks of calls

Function = Callable[..., Any]
"""A function of torch's, which its replacement gets before the arguments of the call."""


@contextmanager
def patched(key: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces an attribute of torch while the block runs, if this torch needs that.

    Only this thread calls the replacement of a function. All threads see that of a value.

    Args:
        key: The entry of the table, such as "GraphLowering.get_attr".
        replacement: In place of a function, it is called with torch's own and the arguments; of a class method, torch's
            own is the plain function. In place of a value, it is called once with torch's, and returns another.

    Raises:
        ExportError: This torch has something else there. The replacement could write a wrong package.
    """
    patch = PATCHES[key]
    if not is_needed(patch):
        yield
        return
    with _LOCK:
        change = _changes.get(key) or _Change(patch)
        _changes[key] = change
        change.blocks += 1
    before = change.current()
    try:
        change.set(functools.partial(replacement, before) if patch.signatures else replacement(before))
        yield
    finally:
        change.set(before)
        with _LOCK:
            change.blocks -= 1
            if not change.blocks:
                change.undo()
                del _changes[key]


@contextmanager
def all_patched(*changes: tuple[str, Callable[..., Any]]) -> Iterator[None]:
    """Makes several changes while the block runs, each of which is what `patched` takes."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patched(*change))
        yield


def instead(function: Function) -> Function:
    """Returns a replacement that calls another function, and never torch's."""
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def is_needed(patch: Patch, version: str = torch.__version__) -> bool:
    """Tells whether a torch has what a change is for, and still needs it."""
    found = _numbers(version)
    return (not patch.since or _numbers(patch.since) <= found) and (not patch.until or found < _numbers(patch.until))


def misfit(patch: Patch) -> str | None:
    """Says how this torch differs from what a patch was written against; None if it does not."""
    try:
        found = vars(owner_of(patch))[patch.name]
    except (ImportError, AttributeError, KeyError):
        return f"has no {patch.key}"
    if not patch.signatures or patch.signatures == (ANY,):
        return None
    signature = _signature(_function(found))
    if signature in patch.signatures:
        return None
    return f"has {patch.key}{signature}, not {patch.key}{' or '.join(patch.signatures)}"


def owner_of(patch: Patch) -> Any:
    """Imports the class or module that defines an attribute."""
    module, _, name = patch.owner.partition(":")
    imported: ModuleType = importlib.import_module(module)
    return getattr(imported, name) if name else imported


class _Change:
    """An attribute that is replaced, by at least one block."""

    def __init__(self, patch: Patch) -> None:
        if (reason := misfit(patch)) is not None:
            raise ExportError(
                f"torch {torch.__version__} {reason}, which exportkit needs to replace",
                hint=f"Export with torch {exporting_torches()}. `exportkit doctor` says what else differs.",
            )
        self.blocks = 0
        self._owner, self._name = owner_of(patch), patch.name
        self._original = vars(self._owner)[patch.name]
        self._here = threading.local() if patch.signatures else None
        if (here := self._here) is not None:
            function = _function(self._original)

            @functools.wraps(function, updated=())
            def in_this_thread(*args: Any, **kwargs: Any) -> Any:
                return getattr(here, "function", function)(*args, **kwargs)

            is_method = isinstance(self._original, (classmethod, staticmethod))
            setattr(self._owner, self._name, type(self._original)(in_this_thread) if is_method else in_this_thread)

    def current(self) -> Any:
        """Returns what this thread calls."""
        if self._here is None:
            return vars(self._owner)[self._name]
        return getattr(self._here, "function", _function(self._original))

    def set(self, value: Any) -> None:
        """Lets this thread call another function, or all threads see another value."""
        if self._here is None:
            setattr(self._owner, self._name, value)
        else:
            self._here.function = value

    def undo(self) -> None:
        """Gives torch back what it had."""
        setattr(self._owner, self._name, self._original)


_LOCK = threading.Lock()
_changes: dict[str, _Change] = {}


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute


def _signature(function: Any) -> str:
    """Returns a function's parameters, without annotations and values of defaults, which mean nothing to a caller."""
    signature, empty = inspect.signature(function), inspect.Parameter.empty
    bare = [
        each.replace(annotation=empty, default=each.default if each.default is empty else _DEFAULT)
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


class _Default:
    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
