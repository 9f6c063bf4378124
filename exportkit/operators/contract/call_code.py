"""A call as Python code that a reader can paste."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.memory_layouts import PLAIN, MemoryLayout
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample

_LITERAL = 64
"""Tensors of up to so many elements may be written down. Larger ones are drawn."""


@dataclass(frozen=True)
class WrittenCall:
    """A call, and the code of its arguments that makes exactly this call: seeded with 0, if it draws values."""

    call: Sample
    args: tuple[str, ...]
    kwargs: dict[str, str]
    seeded: bool

    def code(self, subject: Subject, shown: str = "{call}") -> str:
        """Returns lines of code. For `shown` see `Problem.shown`."""
        op = operator_code(subject)
        passed = ", ".join([*self.args, *(f"{name}={value}" for name, value in self.kwargs.items())])
        lines = ["torch.manual_seed(0)"] if self.seeded else []
        if re.search(r"\bargs\b", shown):
            lines.append(f"args = ({', '.join(self.args)}{',' if len(self.args) == 1 else ''})")
            names = "".join(f", {name}={value}" for name, value in self.kwargs.items())
            shown = shown.replace("*args", f"*args{names}")
        return "\n".join([*lines, shown.replace("{call}", f"{op}({passed})").replace("{op}", op)])


def operator_code(subject: Subject) -> str:
    """Returns such as `torch.ops.my_ops.scale`."""
    namespace, _, name = subject.name.partition("::")
    return f"torch.ops.{namespace}.{name}"


def ways_to_write(call: Sample, layout: MemoryLayout = PLAIN, number: int | None = None) -> Iterator[WrittenCall]:
    """Yields calls like this one that can be written down, the shortest first.

    The first ones have other values. Whether they show the same is for the caller to find out. The last has the call's
    own values, as far as they can be written. The code, but not the call, has the tensors, or tensor `number`, in the
    layout.
    """
    for draw in ("randn", "rand"):
        yield _written(call, _Pen(draw, layout, number))
    yield _written(call, _Pen(None, layout, number))


def _written(call: Sample, pen: _Pen) -> WrittenCall:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        args = [pen.write(value) for value in call.args]
        kwargs = {name: pen.write(value) for name, value in call.kwargs.items()}
    finally:
        torch.set_rng_state(state)
    values = {name: value for name, (_, value) in kwargs.items()}
    made = Sample(call.label, tuple(value for _, value in args), values)
    return WrittenCall(
        made, tuple(code for code, _ in args), {name: code for name, (code, _) in kwargs.items()}, pen.drew
    )


class _Pen:
    """Writes values in order. `draw` is the function of torch that floating tensors come from; None: their values."""

    def __init__(self, draw: str | None, layout: MemoryLayout, number: int | None) -> None:
        self.draw, self.layout, self.number = draw, layout, number
        self.written = 0
        self.drew = False

    def write(self, value: Any) -> tuple[str, Any]:
        """Returns the code of a value, and what the code evaluates to."""
        if isinstance(value, Tensor):
            code, made = self._tensor(value)
            self.written += 1
            laid = self.number in (None, self.written - 1)
            return self.layout.code(code, made) if laid else code, made
        if isinstance(value, list | tuple):
            parts = [self.write(part) for part in value]
            inner = ", ".join(code for code, _ in parts)
            code = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(parts) == 1 else ''})"
            return code, type(value)(part for _, part in parts)
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return f'float("{value}")', value
        if isinstance(value, torch.device):
            return f'torch.device("{value}")', value
        return repr(value), value

    def _tensor(self, tensor: Tensor) -> tuple[str, Tensor]:
        own, strided = tensor.detach(), not tensor.is_contiguous()
        if strided:  # the memory that its elements lie in, without what comes before and after
            reach = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, own.stride())) if own.numel() else 0
            own = torch.as_strided(own, (reach,), (1,))
        code, value = self._values(own)
        if strided:
            shape, stride = tuple(tensor.shape), tensor.stride()
            code, value = f"{code}.as_strided({shape}, {stride})", value.as_strided(shape, stride)
        return code, value

    def _values(self, tensor: Tensor) -> tuple[str, Tensor]:
        shape = ", ".join(str(size) for size in tensor.shape) or "()"
        options = "" if tensor.device.type == "cpu" else f', device="{tensor.device}"'
        if tensor.is_floating_point() and (self.draw is not None or tensor.numel() > _LITERAL):
            draw = self.draw or "randn"
            self.drew = True
            if tensor.dtype.itemsize > 1:
                value = getattr(torch, draw)(tuple(tensor.shape), dtype=tensor.dtype)
                options = _dtype(tensor, torch.float32)
                moved = "" if tensor.device.type == "cpu" else f'.to("{tensor.device}")'
                return f"torch.{draw}({shape}{options}){moved}", value.to(tensor.device)
            value = getattr(torch, draw)(tuple(tensor.shape)).to(tensor.dtype).to(tensor.device)  # float8
            return f"torch.{draw}({shape}).to({tensor.dtype}){options and f'.to({options[9:]})'}", value
        if tensor.numel() == 0:
            return f"torch.empty({shape}{_dtype(tensor, torch.float32)}{options})", tensor.clone()
        if tensor.numel() > _LITERAL and not tensor.is_complex():
            low, high = int(tensor.min()), int(tensor.max()) + 1
            self.drew = True
            value = torch.randint(low, high, tuple(tensor.shape)).to(tensor.dtype).to(tensor.device)
            return (
                f"torch.randint({low}, {high}, ({shape},)).to({tensor.dtype}){options and f'.to({options[9:]})'}",
                value,
            )
        inferred = torch.int64 if not (tensor.is_floating_point() or tensor.is_complex()) else torch.float32
        inferred = torch.bool if tensor.dtype == torch.bool else inferred
        written = str(tensor.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
        return f"torch.tensor({written}{_dtype(tensor, inferred)}{options})", tensor.clone()


def _dtype(tensor: Tensor, default: torch.dtype) -> str:
    return "" if tensor.dtype == default else f", dtype={tensor.dtype}"
