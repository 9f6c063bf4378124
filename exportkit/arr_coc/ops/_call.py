"""Calls operators through the dispatcher with little overhead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

# Imported by name, because after other work has emptied the caches, an attribute lookup takes most of a microsecond.
from torch import is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd
from torch.compiler import is_dynamo_compiling

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
