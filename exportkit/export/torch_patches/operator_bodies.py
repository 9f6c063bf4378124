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

from exportkit.export.torch_patches.patched import patched
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


def body_of(operator: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Returns the function in Python that a call of an operator runs; None for torch's, those in C++ and Triton's."""
    if not isinstance(operator, OpOverload) or operator.namespace in TORCH_NAMESPACES:
        return None
    if operator._schema.name in triton_ops_to_kernels:
        return None
    key = python_key(operator, _device(args, kwargs))
    return partial(operator._op_dk, getattr(torch._C.DispatchKey, key)) if key else None


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the type of device that a call computes on: that of its tensors, if it has any."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = tensors or [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    return next((each.type for each in devices if each.type != "cpu"), "cpu")


def traced_bodies() -> AbstractContextManager[None]:
    """Lets torch trace the body of such an operator in its place, while the block runs.

    Raises:
        ExportError: This torch lacks the function that is changed.
    """
    return patched("proxy_tensor.maybe_handle_decomp", _with_bodies)


def _with_bodies(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(mode: Any, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    return decompose


@contextmanager
def _without_autocast(mode: Any, device: str) -> Iterator[None]:
    """Disables autocast while the block runs, in what is traced, too: torch notes it where a model calls it alone."""
    note = partial(mode.tracer.create_node, "call_function") if mode.pre_dispatch else lambda *_: None
    begin = note(_enter_autocast, (device, torch.get_autocast_dtype(device), False, False), {})
    with torch.autocast(device, enabled=False):
        yield
    note(_exit_autocast, (begin,), {})
