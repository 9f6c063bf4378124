"""How the wrappers call the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# By name, like all that a call needs here: what other work has thrown out of the caches takes most of a microsecond to
# look up.
from torch import is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd
from torch.compiler import is_dynamo_compiling


def operator(name: str, namespace: str = "arr_coc") -> Callable[..., Any]:
    """`<namespace>::<name>` as a function, by position; where gradients are off, past its autograd rule.

    torch runs a rule that was registered from Python in Python, also where it has nothing to do: 4 to 10 us a call, and
    the output lives so much longer that the next one finds other memory, cold. torch.compile traces the plain call.
    """
    overload = getattr(getattr(torch.ops, namespace), name).default
    dispatch = overload._op  # all that calling `overload` does, without a frame of Python in between

    def call(*args: Any) -> Any:
        if is_grad_enabled() or is_dynamo_compiling():
            return overload(*args)
        with _AutoDispatchBelowAutograd():
            return dispatch(*args)

    return call
