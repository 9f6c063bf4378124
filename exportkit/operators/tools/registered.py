"""What is registered with torch's dispatcher, for the operators that a library brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._library.simple_registry import singleton
from torch._library.triton import triton_ops_to_kernels
from torch._ops import OpOverload

from exportkit.export.torch_patches.opaque import has_one_kernel, has_own_fake
from exportkit.libraries import TORCH_NAMESPACES
from exportkit.operators.contract.check_fakes import needs_no_fake

_DEVICES: Mapping[str, str] = {"CPU": "cpu", "CUDA": "cuda", "XPU": "xpu", "MPS": "mps", "PrivateUse1": "privateuse1"}
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
_PERHAPS = "its parts, or none"
_AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA")
_AUTOCAST: Mapping[str, str] = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}


@contextmanager
def newly_registered() -> Iterator[Callable[[], list[str]]]:
    """Tells which operators are registered in the block: `namespace::name` or `namespace::name.overload`, sorted.

    An operator counts if the block defined it or gave it a kernel. Those of torch's own namespaces do not count.
    """
    before, kernels_before = _names(), _kernels()

    def found() -> list[str]:
        added = (_names() - before) | {name for _, name in _kernels() - kernels_before}
        known = set(torch._C._dispatch_get_all_op_names())
        return sorted(name for name in added & known if name.partition("::")[0] not in TORCH_NAMESPACES)

    yield found


def overload(name: str) -> OpOverload:
    """Returns an operator by `namespace::name` or `namespace::name.overload`."""
    namespace, _, rest = name.partition("::")
    base, _, kind = rest.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), kind or "default")
    return found


def has_schema(name: str) -> bool:
    """Whether an operator is defined. A kernel may be registered for one that is not."""
    base, _, kind = name.partition(".")
    return any(schema.overload_name == kind for schema in torch._C._jit_get_schemas_for_operator(base))


def devices_of(name: str) -> tuple[str, ...]:
    """Returns the devices that an operator has kernels for; `any` if its kernel serves all."""
    if any(has_kernel(name, key) for key in _COMPOSITE):
        return ("any",)
    return tuple(device for key, device in _DEVICES.items() if has_kernel(name, key))


def fake_of(name: str) -> str | None:
    """Returns what computes shapes without data: `register_fake`, `Meta kernel`, `its parts`, `not needed`, or None.

    Only a call tells whether an operator with one kernel for all devices has parts.
    """
    if singleton.find(name).fake_impl.kernel is not None:
        return "register_fake"
    if has_own_fake(overload(name)):
        return "Meta kernel"
    if has_one_kernel(overload(name)):
        return _PERHAPS
    if any(has_kernel(name, key) for key in _COMPOSITE) or name in triton_ops_to_kernels:
        return "its parts"
    return "not needed" if needs_no_fake(overload(name)) else None


def gradient_of(name: str) -> str | None:
    """Returns what computes gradients: `autograd kernel`, `its parts`, which it may not have, or None."""
    if any(has_kernel(name, key) for key in _AUTOGRAD):
        return "autograd kernel"
    if has_one_kernel(overload(name)):
        return _PERHAPS
    return "its parts" if has_kernel(name, "CompositeImplicitAutograd") else None


def autocast_of(name: str) -> tuple[str, ...]:
    """Returns the devices for which torch.autocast has a rule for the operator."""
    return tuple(device for key, device in _AUTOCAST.items() if has_kernel(name, key))


def is_python(name: str) -> bool:
    """Whether a kernel of the operator is a Python function, which a package cannot hold."""
    namespace, _, rest = name.partition("::")
    keys = (*_DEVICES, *_COMPOSITE)
    return any(f"{namespace}/{rest}/{key}" in torch.library._impls for key in keys)


def _names() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


def _kernels() -> set[tuple[str, str]]:
    keys = (*_DEVICES, *_COMPOSITE)
    return {(key, name) for key in keys for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
