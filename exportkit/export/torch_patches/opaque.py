"""Keeps operators whole whose one kernel for all devices reads memory.

torch takes such a kernel (CompositeImplicitAutograd, where c10::RegisterOperators puts a function, too) for a composite
of other operators, and runs it on tensors without memory when it traces or compiles. It takes no fake kernel for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._library.simple_registry import singleton
from torch._library.utils import Kernel
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.export.torch_patches.operator_bodies import in_python
from exportkit.export.torch_patches.patched import Function, patched
from exportkit.libraries import TORCH_NAMESPACES

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_META = torch._C.DispatchKey.Meta
# Kernels of these come before the composite one. torch sees only those of devices at once where autograd is looked up.
_BEFORE = ("CompositeExplicitAutograd", "CPU", "CUDA")
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

kept: set[OpOverload] = set()
"""The operators that `opaque_operators` keeps whole at this time."""


def has_one_kernel(operator: OpOverload) -> bool:
    """Whether an operator has a C++ kernel that torch takes for a composite."""
    key = "CompositeImplicitAutograd"
    return _has_kernel(operator.name(), key) and not in_python(operator, key)


def uncertain_operators() -> list[OpOverload]:
    """Returns the operators of which only a call tells whether they are composites."""
    return [each for each in _custom() if each not in kept]


def has_own_fake(operator: OpOverload) -> bool:
    """Whether somebody gave a fake kernel to an operator that torch takes for a composite: it is none then."""
    return _META in operator.py_kernels or _has_kernel(operator.name(), "Meta")


def run_composite(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """Calls the kernel that torch takes for a composite."""
    return operator._op_dk(_COMPOSITE, *args, **kwargs)


def reads_memory(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """Tells whether the kernel reads or writes memory itself, and does not only call other operators.

    The kernel is called with tensors that have memory, so that it cannot crash, and refuse to have it written. Zeros in
    that memory do not change what a composite answers. torch's fake tensors have none: reading theirs ends the process.
    """
    try:
        answers = [_guarded_answer(operator, args, kwargs, memory) for memory in (torch.clone, torch.zeros_like)]
        torch.testing.assert_close(*answers, rtol=0, atol=0, equal_nan=True)
    except Exception:  # It took the same call before. The stable ABI does not say what went wrong.
        return True
    return False


def _guarded_answer(operator: OpOverload, args: Any, kwargs: Any, memory: Callable[..., Any]) -> list[Any]:
    devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.is_cuda}
    guard = _Unwrapping(memory)
    own, named = guard.wrapped((args, kwargs))
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        with guard:
            answer = run_composite(operator, own, named)
        return [each for each in tree_leaves(_unwrapped(answer)) if isinstance(each, torch.Tensor)]


class _Guarded(torch.Tensor):
    """A tensor with memory that refuses to be written, but by torch's operators."""

    inside: torch.Tensor

    @classmethod
    # torch's annotation says instance method, and torch calls it on the class.
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented  # _Unwrapping comes first


def _unwrapped(values: Any) -> Any:
    return tree_map_only(_Guarded, lambda each: each.inside, values)


class _Unwrapping(TorchDispatchMode):
    """Runs torch's operators on what is inside, and guards all that they make."""

    def __init__(self, memory: Callable[..., Any]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, named = _unwrapped((args, kwargs or {}))
        return self.wrapped(func(*own, **named))

    def wrapped(self, values: Any) -> Any:
        """Guards copies of the tensors with memory of their own. Those of other layouts and classes stay."""

        def guard(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                return tensor
            guarded: _Guarded = torch.Tensor._make_subclass(_Guarded, self._memory(tensor.detach()))
            torch._C._set_throw_on_mutable_data_ptr(guarded)
            guarded.inside = tensor.detach().clone()
            return guarded

        return tree_map_only(torch.Tensor, guard, values)


@contextmanager
def opaque_operators() -> Iterator[None]:
    """Lets torch trace and compile calls of operators with a fake kernel of their own as they are, in this block.

    A kernel under another key comes before the composite one, and calls it. Gradients inside of the model do not go
    through such an operator meanwhile.
    """
    found = [each for each in _custom() if has_own_fake(each) and each not in kept]
    if not found:
        yield
        return
    fakes = []
    kernels = ((each, key, partial(each._op_dk, _COMPOSITE)) for each in found for key in _BEFORE)
    try:
        with _registered(kernels), patched("OpOverload.decompose", _unless_kept):
            for operator in found:
                if _META in operator.py_kernels:
                    fake = Kernel(operator.py_kernels[_META], "py_impl")
                    holder = singleton.find(operator.name()).fake_impl
                    holder.kernels.append(fake)
                    fakes.append((holder, fake))
                operator._dispatch_cache.clear()
            kept.update(found)
            yield
    finally:
        kept.difference_update(found)
        for holder, fake in fakes:
            holder.kernels.remove(fake)
        for operator in found:
            operator._dispatch_cache.clear()


def _unless_kept(decompose: Function, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if operator in kept else decompose(operator, *args, **kwargs)


def without_opaque(table: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns a table of what Inductor takes apart without the operators that are kept whole."""
    return {operator: parts for operator, parts in table.items() if operator not in kept}


@contextmanager
def composite_calls(device: torch.device, call: Callable[[OpOverload, Any, Any], Any]) -> Iterator[None]:
    """Hands over the calls of the operators that torch takes for composites and that are not kept whole, in this block.

    A mode does not see them: torch calls the kernel before it asks modes. `call` gets the operator and the arguments,
    and returns the answer, that of `run_composite`.
    """

    def handing(operator: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(operator, args, kwargs)

    keys = {"AutogradCPU", f"Autograd{device.type.upper()}"}
    with _registered((each, key, handing(each)) for each in uncertain_operators() for key in keys):
        yield


@contextmanager
def _registered(kernels: Iterable[tuple[OpOverload, str, Callable[..., Any]]]) -> Iterator[None]:
    """Registers kernels that are not there while the block runs, without torch's note that operators are Python's."""
    libraries: dict[str, torch.library.Library] = {}
    try:
        for operator, key, kernel in kernels:
            if not _has_kernel(operator.name(), key):
                namespace, _, name = operator.name().partition("::")
                if namespace not in libraries:
                    libraries[namespace] = torch.library.Library(namespace, "IMPL")
                libraries[namespace].m.impl(name, key, kernel, False)  # type: ignore[union-attr]  # it is not destroyed
        yield
    finally:
        for library in libraries.values():
            library._destroy()


def _custom() -> Iterator[OpOverload]:
    """Yields the operators, but torch's own, with a C++ kernel that torch takes for a composite."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    for name in itertools.filterfalse(lambda name: name.partition("::")[0] in TORCH_NAMESPACES, names):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        if not in_python(operator, "CompositeImplicitAutograd"):
            yield operator
