"""What to do where code uses an operator that no loaded library defines, or whose fake kernel torch does not take."""

from __future__ import annotations

import importlib.metadata
import re

import torch

from exportkit.libraries import TORCH_NAMESPACES, loaded_libraries

_OPERATOR = r"(?P<namespace>\w+)::(?P<name>\w+)"
# What torch says where a fake, a kernel or a gradient is added, where torch.ops is asked, and where a program is read.
_SAID = tuple(
    re.compile(pattern)
    for pattern in (
        rf"operator {_OPERATOR}\S* does not exist",
        r"'_OpNamespace' '(?P<namespace>\w+)' object has no attribute '(?P<name>\w+)'",
        rf"(?:Could not find schema for|No such operator|no operator named) {_OPERATOR}",
    )
)


def missing_operator(text: str) -> str | None:
    """Returns the operator, `namespace::name`, that by an error of torch is not defined; None for any other error."""
    for said in _SAID:
        if (match := said.search(text)) and match["namespace"] not in TORCH_NAMESPACES:
            return f"{match['namespace']}::{match['name']}"
    return None


def advice(operator: str) -> str:
    """Says how to give the library of an operator, `namespace::name`, and what was loaded instead."""
    namespace = operator.partition("::")[0]
    try:
        found = importlib.metadata.version(namespace)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return (
            f"{namespace} {found} is installed, but its operators do not load: install its build for torch "
            f"{torch.__version__}"
        )
    loaded = "; ".join(
        f"{library.path.name} with {', '.join(f'{each}::*' for each in sorted(library.namespaces)) or 'kernels only'}"
        for library in loaded_libraries()
    )
    return (
        f"No loaded library defines {operator}{loaded and f' (loaded: {loaded})'}. Give the library that does, or the "
        "Python module that loads it: --op-library PATH|MODULE"
    )


# What torch says where a fake kernel is given to an operator that it takes for a composite.
_REFUSED = re.compile(r"the operator '?(\w+::[\w.]+)'?,? .*CompositeImplicitAutograd", re.DOTALL)


def fake_to_write(name: str) -> str:
    """Returns the decorator of a fake kernel, in a form that torch takes for the operator."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return f'@torch.library.register_fake("{name}")'
    overload = name.replace("::", ".") + (".default" if "." not in name else "")
    return f"@torch.ops.{overload}.py_impl(torch._C.DispatchKey.Meta)"


def advice_if_refused(text: str) -> str | None:
    """Says what to write instead, if by an error of torch it refused a fake kernel; None for any other error."""
    if (refused := _REFUSED.search(text)) is None:
        return None
    return f"If its kernel reads memory, write {fake_to_write(refused[1])}. If it only calls operators, it needs none."
