"""Makes a module of each method of a model: its `forward` is the method, and its weights are the model's own."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.errors import UsageError
from exportkit.spec import FORWARD, METHOD_FIELDS, ExportSpec


def method_specs(spec: ExportSpec) -> dict[str, ExportSpec]:
    """Returns a spec for each method of a spec: of a module whose `forward` is the method."""
    return {
        name: replace(
            spec,
            model=_module(spec.model, name, method.attribute or name),
            methods={},
            **{field: getattr(method, field) for field in METHOD_FIELDS},
        )
        for name, method in spec.entries.items()
    }


def _module(model: torch.nn.Module, name: str, attribute: str) -> torch.nn.Module:
    """Returns a module that calls an attribute of the model. It has the same names, tensors and class.

    The two share the dictionaries of parameters, buffers and submodules: what is put into those of one is seen by both.
    """
    if attribute == FORWARD:
        return model
    try:
        called = operator.attrgetter(attribute)(model)
    except AttributeError:
        raise UsageError(
            f"the method {name} calls {type(model).__name__}.{attribute}, which does not exist",
            hint="Name an attribute that does: exportkit.Method(attribute=...).",
        ) from None
    if not callable(called):
        raise UsageError(f"the method {name} calls {type(model).__name__}.{attribute}, a {type(called).__name__}")
    module = object.__new__(type(model))
    module.__dict__.update(model.__dict__)
    if inspect.ismethod(called) and called.__self__ is model:
        called = called.__func__.__get__(module)  # so that `self` has the buffers that tracing replaces
    module.forward = _function(module, called, attribute)
    return module


def _function(module: torch.nn.Module, called: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    """Returns a function with the signature of a method, or of a submodule's forward.

    While it runs, the module has its own forward, which the method may call.
    """
    inner = called.forward if isinstance(called, torch.nn.Module) else called
    own = {FORWARD: module.__dict__[FORWARD]} if FORWARD in module.__dict__ else {}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        replaced = module.__dict__.pop(FORWARD)
        module.__dict__.update(own)
        try:
            return called(*args, **kwargs)
        finally:
            module.__dict__[FORWARD] = replaced

    forward.__name__ = attribute
    forward.__dict__["__signature__"] = inspect.signature(inner)
    return forward


def written_names(names: Sequence[str], writes: Sequence[str]) -> tuple[str, ...]:
    """Returns the input tensors that are declared to be written.

    A declaration is the name of a tensor, or of a value that has tensors.
    """
    found = [name for name in names if any(name == each or name.startswith(f"{each}.") for each in writes)]
    for each in writes:
        if not any(name == each or name.startswith(f"{each}.") for name in names):
            raise UsageError(
                f"{each} is declared to be written, and there is no such input tensor",
                hint=f"The inputs are {', '.join(names)}.",
            )
    return tuple(found)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a buffer's name matches one of the patterns of a spec's `state`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
