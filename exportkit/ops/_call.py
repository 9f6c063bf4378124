"""How the wrappers call the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# By name: each attribute that is looked up on the way costs most of a microsecond where other work has had the caches.
from torch import is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd
from torch.compiler import is_compiling


def operator(name: str, namespace: str = "arr_coc") -> Callable[..., Any]:
    """`<namespace>::<name>` as a function, by position; where gradients are off, past its autograd rule.

    torch runs a rule that was registered from Python in Python, also where it has nothing to do: 4 to 10 us a call, and
    the output lives so much longer that the next one finds other memory, cold. What is traced has the plain call.
    """
    overload = getattr(getattr(torch.ops, namespace), name).default

    def call(*args: Any) -> Any:
        if is_grad_enabled() or is_compiling():
            return overload(*args)
        with _AutoDispatchBelowAutograd():
            return overload(*args)

    return call
