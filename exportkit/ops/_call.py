"""How the wrappers call the dispatcher."""

from __future__ import annotations

from typing import Any

# By name: each attribute that is looked up on the way costs most of a microsecond where other work has had the caches.
from torch import is_grad_enabled
from torch._C import _AutoDispatchBelowAutograd
from torch._ops import OpOverload
from torch.compiler import is_compiling


def call(operator: OpOverload, *args: Any) -> Any:
    """`operator(*args)`; where gradients are off, past its autograd rule.

    torch runs a rule that was registered from Python in Python, also where it has nothing to do: 4 to 10 us a call, and
    the output lives so much longer that the next one finds other memory, cold. What is traced has the plain call.
    """
    if is_grad_enabled() or is_compiling():
        return operator(*args)
    with _AutoDispatchBelowAutograd():
        return operator(*args)
