"""Traces the bodies of operators that Python implements in their places: hosts do not have their source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._library.triton import triton_ops_to_kernels
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._pytree import tree_leaves

from exportkit.export.torch_patches.patched import Function, patched
from exportkit.libraries import TORCH_NAMESPACES


class BodyError(Exception):
    """torch could not trace the body of an operator.

    Attributes:
        operator: The operator's name.
        error: torch's error.
    """

    def __init__(self, operator: str, error: Exception) -> None:
        super().__init__(str(error))
        self.operator, self.error = operator, error


def python_key(operator: OpOverload, device: str) -> str | None:
    """Returns the dispatch key of an operator's kernel for a type of device, if Python registered that kernel."""
    for key in (torch._C._dispatch_key_for_device(device), "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if has_kernel(operator.name(), key):
            return key if in_python(operator, key) else None
    return None


def in_python(operator: OpOverload, key: str) -> bool:
    """Whether Python registered an operator's kernel for a dispatch key.

    torch has no public function for this. This private set is the same in 2.11 and 2.13.
    """
    return f"{operator.name().replace('::', '/', 1)}/{key}" in torch.library._impls


def _grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiplies each group of rows [rows, k] by its weight, of [groups, k, n]; `offs` says where each group ends.

    The operator reads the ends, and multiplies what there is of each. Here all rows meet all weights: that takes more
    products, but neither sizes that depend on data nor copies of weights for each row.
    """
    rows = torch.arange(input.shape[0], device=input.device)
    group = (offs[:, None] <= rows).sum(0)
    found = torch.matmul(input, weight)[group.clamp(max=weight.shape[0] - 1), rows]
    return found.masked_fill((group == weight.shape[0])[:, None], 0.0)


# Operators whose bodies torch.export does not take, which branch on values, with bodies that it does.
_TRACEABLE = {"transformers::grouped_mm_fallback": _grouped_mm}


def body_of(operator: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Returns the function in Python that a call of an operator runs; None for torch's, those in C++ and Triton's."""
    if not isinstance(operator, OpOverload) or operator.namespace in TORCH_NAMESPACES:
        return None
    if operator._schema.name in triton_ops_to_kernels:
        return None
    key = python_key(operator, _device(args, kwargs))
    if key and operator._schema.name in _TRACEABLE:
        return _TRACEABLE[operator._schema.name]
    return partial(operator._op_dk, getattr(torch._C.DispatchKey, key)) if key else None


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the type of device that a call computes on: that of its tensors, if it has any."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = tensors or [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    return next((each.type for each in devices if each.type != "cpu"), "cpu")


def traced_bodies() -> AbstractContextManager[None]:
    """Lets torch trace the body of such an operator in its place, while the block runs."""
    return patched("proxy_tensor.maybe_handle_decomp", _with_bodies)


def _with_bodies(decomposed: Function, mode: Any, operator: OpOverload, args: Any, kwargs: Any) -> Any:
    if (body := body_of(operator, args, kwargs)) is None:
        return decomposed(mode, operator, args, kwargs)
    device = _device(args, kwargs)
    rule = f"Autocast{device.upper()}"
    try:
        if not torch.is_autocast_enabled(device) or not has_kernel(operator.name(), rule):
            with mode:
                return body(*args, **kwargs)
        # register_autocast's: it casts what is given, and calls the operator again.
        with _without_autocast(mode, device), mode:
            return operator._op_dk(getattr(torch._C.DispatchKey, rule), *args, **kwargs)
    except BodyError:
        raise
    except Exception as error:
        # The body is the user's code and may raise anything.
        raise BodyError(operator.name(), error) from error


@contextmanager
def _without_autocast(mode: Any, device: str) -> Iterator[None]:
    """Disables autocast while the block runs, in what is traced, too: torch notes it where a model calls it alone."""
    note = partial(mode.tracer.create_node, "call_function") if mode.pre_dispatch else lambda *_: None
    begin = note(_enter_autocast, (device, torch.get_autocast_dtype(device), False, False), {})
    with torch.autocast(device, enabled=False):
        yield
    note(_exit_autocast, (begin,), {})
