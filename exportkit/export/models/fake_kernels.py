"""How a fake kernel is given to an operator, in a form that torch takes for it."""

from __future__ import annotations

import re

import torch

# What torch says where a fake kernel is given to an operator that it takes for a composite.
_REFUSED = re.compile(r"the operator '?(\w+::[\w.]+)'?,? .*CompositeImplicitAutograd", re.DOTALL)


def fake_to_write(name: str) -> str:
    """Returns the decorator of a fake kernel.

    Args:
        name: `namespace::name` or `namespace::name.overload`.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return f'@torch.library.register_fake("{name}")'
    overload = name.replace("::", ".") + (".default" if "." not in name else "")
    return f"@torch.ops.{overload}.py_impl(torch._C.DispatchKey.Meta)"


def advice_if_refused(text: str) -> str | None:
    """Says what to write instead, if by an error of torch it refused a fake kernel; None for any other error."""
    if (refused := _REFUSED.search(text)) is None:
        return None
    return f"If its kernel reads memory, write {fake_to_write(refused[1])}. If it only calls operators, it needs none."
