"""Follows a call of a model operator by operator: what differs from another call, and which operator writes where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from exportkit.export.models.source_lines import where_now
from exportkit.export.torch_patches.dispatch import OperatorMode, written_leaves
from exportkit.libraries import TORCH_NAMESPACES

UNWRITTEN = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
"""Operators that allocate memory and write nothing there."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns numbers that change with a tensor's dtype, sizes or bits."""
    if tensor.is_nested or isinstance(tensor, FakeTensor):  # only within the model: it has no one shape, or no bits
        return (tensor.dtype,)
    described = (tensor.dtype, tuple(tensor.shape))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor._is_zerotensor():
        return described  # only within the model: sparse tensors and zeros of forward-mode gradients have no bits
    data = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    bits = _words(data.contiguous())
    return (*described, int(bits.sum()), int(torch.hash_tensor(bits).view(torch.int64))) if bits.numel() else described


def _words(data: torch.Tensor) -> torch.Tensor:
    """Returns the bits of contiguous memory as integers, of 64 bits where they fit: a large weight is read in fewer."""
    size = data.element_size()
    if size < 8 and (data.numel() * size) % 8 == 0 and (data.storage_offset() * size) % 8 == 0:
        return data.flatten().view(torch.int64)
    return data.view(_INTEGERS[size])


class Writes(OperatorMode):
    """Watches tensors for an operator that changes them.

    Attributes:
        lines: The operators and the lines that call them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._now = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        self.lines: list[str] = []

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and looks at the tensors after it."""
        answer = func(*args, **kwargs)
        leaves = written_leaves(func, args, kwargs)
        written = {_address(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} - {0}
        for name, tensor in self._tensors.items():
            if (now := fingerprint(tensor)) != self._now[name] or _address(tensor) in written:
                self._now[name] = now
                self.lines.append(f"{name}: {_called(func)}")
        return answer


def _address(tensor: torch.Tensor) -> int:
    """Returns where a tensor's memory begins; 0 if it has none of its own, as sparse tensors."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


@dataclass(frozen=True)
class _Step:
    """An operator of a call: where it was called, what it took and what it gave; the tensors of a custom one only."""

    called: str
    operator: OpOverload
    numbers: tuple[object, ...]
    tensors: tuple[object, ...]
    answer: tuple[object, ...]


class OperatorTrace(OperatorMode):
    """Records the operators of a call, except those that only allocate memory or view it.

    It fills memory that is allocated and not written, which might be the same again by chance: with NaN, or with 1.

    Attributes:
        steps: The operators, in order.
        unwritten: The operators that allocated such memory.
        undeclared: The operators that wrote into an argument which their schema does not say they write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.unwritten: list[str] = []
        self.undeclared: list[str] = []

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and records it."""
        if func.overloadpacket in UNWRITTEN:
            self.unwritten.append(_called(func))
            return filled(func(*args, **kwargs))
        if func.is_view:
            return func(*args, **kwargs)
        custom = func.namespace not in TORCH_NAMESPACES
        tensors = _fingerprints((args, kwargs)) if custom else ()
        answer = func(*args, **kwargs)
        self.steps.append(_Step(_called(func), func, _numbers((args, kwargs)), tensors, _fingerprints(answer)))
        if custom and not func._schema.is_mutable and _fingerprints((args, kwargs)) != tensors:
            self.undeclared.append(_called(func))
        return answer


def filled(memory: torch.Tensor) -> torch.Tensor:
    """Fills memory with NaN, or with 1 where the dtype has none, so that results show who reads it."""
    return memory.fill_(float("nan") if memory.is_floating_point() or memory.is_complex() else 1)


def changed_number(one: OperatorTrace, other: OperatorTrace) -> str | None:
    """Says which number that Python code computes differs between two calls. None if none does."""
    for a, b in zip(one.steps, other.steps):
        if a.operator is not b.operator:
            return f"{a.called} is called once, and in its place {b.called} the other time"
        if len(a.numbers) == len(b.numbers) and a.numbers != b.numbers:
            pairs = ", ".join(f"{x} and then {y}" for x, y in zip(a.numbers, b.numbers) if x != y)
            return f"{a.called} is given the number {pairs}"
    return None


DIFFERS = "is given a tensor that differs from call to call"


def first_difference(one: OperatorTrace, other: OperatorTrace) -> str | None:
    """Says which operator is the first to answer differently in the second of two calls. None if none does."""
    for a, b in zip(one.steps, other.steps):
        if a.answer != b.answer:
            if torch.Tag.nondeterministic_seeded in a.operator.tags:
                return f"{a.called} draws random numbers"
            if a.operator.namespace not in TORCH_NAMESPACES and a.tensors == b.tensors:
                return (
                    f"{a.called} answers the same arguments differently: it keeps a state, or returns unwritten memory"
                )
            return f"{a.called} {DIFFERS}"
    return None


def _numbers(value: Any) -> tuple[object, ...]:
    """Returns the numbers in a nested value, without NaN, which would differ from itself."""
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, (bool, int, float)) and leaf == leaf)


def _fingerprints(value: Any) -> tuple[object, ...]:
    """Returns the fingerprints of the tensors in a nested value."""
    with _disable_current_modes():  # a model may itself trace
        return tuple(fingerprint(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _called(operator: OpOverload) -> str:
    """Returns the operator and the line of the model's code that calls it."""
    where = where_now()
    return f"{operator}{' at ' + where if where else ''}"
