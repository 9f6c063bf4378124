"""How the wrappers call the dispatcher."""

from __future__ import annotations

from typing import Any

import torch


def call(operator: torch._ops.OpOverload, *args: Any) -> Any:
    """`operator(*args)`; where gradients are off, past its autograd rule.

    torch runs a rule that was registered from Python in Python, also where it has nothing to do: 4 to 10 us a call, and
    the output lives so much longer that the next one finds other memory, cold. What is traced has the plain call.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)
