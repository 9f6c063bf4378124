"""A call as Python code that a reader can paste."""

from __future__ import annotations

import math
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
        op = f"torch.ops.{subject.name.replace('::', '.')}"
        passed = ", ".join([*self.args, *(f"{name}={value}" for name, value in self.kwargs.items())])
        lines = ["torch.manual_seed(0)"] if self.seeded else []
        if re.search(r"\bargs\b", shown):
            lines.append(f"args = ({', '.join(self.args)}{',' if len(self.args) == 1 else ''})")
            names = "".join(f", {name}={value}" for name, value in self.kwargs.items())
            shown = shown.replace("*args", f"*args{names}")
        return "\n".join([*lines, shown.replace("{call}", f"{op}({passed})").replace("{op}", op)])


def number_code(value: float) -> str:
    """Returns the code of a number, also of one that is not finite."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def ways_to_write(call: Sample, layout: MemoryLayout = PLAIN, number: int | None = None) -> Iterator[WrittenCall]:
    """Yields calls like this one that can be written down, the shortest first.

    The first ones have other values. Whether they show the same is for the caller to find out. The last has the call's
    own values, as far as they can be written. The code, but not the call, has the tensors, or tensor `number`, in the
    layout.
    """
    for draw in ("randn", "rand", None):
        yield _Pen(draw, layout, number).call(call)


class _Pen:
    """Writes values in order. `draw` is the function of torch that floating tensors come from; None: their values."""

    def __init__(self, draw: str | None, layout: MemoryLayout, number: int | None) -> None:
        self.draw, self.layout, self.number = draw, layout, number
        self.written = 0
        self.drew = False

    def call(self, call: Sample) -> WrittenCall:
        """Writes a call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            args = [self.write(value) for value in call.args]
            kwargs = {name: self.write(value) for name, value in call.kwargs.items()}
        made = Sample(call.label, tuple(v for _, v in args), {name: v for name, (_, v) in kwargs.items()})
        return WrittenCall(made, tuple(c for c, _ in args), {name: c for name, (c, _) in kwargs.items()}, self.drew)

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
        if isinstance(value, float):
            return number_code(value), value
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
        code, value = self._on_cpu(tensor)
        moved = "" if tensor.device.type == "cpu" else f'.to("{tensor.device}")'
        return code + moved, value.to(tensor.device)

    def _on_cpu(self, tensor: Tensor) -> tuple[str, Tensor]:
        size, shape = tuple(tensor.shape), ", ".join(str(size) for size in tensor.shape) or "()"
        if tensor.is_floating_point() and (self.draw is not None or tensor.numel() > _LITERAL):
            draw = self.draw or "randn"
            self.drew = True
            if tensor.dtype.itemsize > 1:
                options = _dtype(tensor, torch.float32)
                return f"torch.{draw}({shape}{options})", getattr(torch, draw)(size, dtype=tensor.dtype)
            return f"torch.{draw}({shape}).to({tensor.dtype})", getattr(torch, draw)(size).to(tensor.dtype)  # float8
        if tensor.numel() == 0:
            return f"torch.empty({shape}{_dtype(tensor, torch.float32)})", tensor.clone()
        if tensor.numel() > _LITERAL and not tensor.is_complex():
            low, high = int(tensor.min()), int(tensor.max()) + 1
            self.drew = True
            code = f"torch.randint({low}, {high}, ({shape},)).to({tensor.dtype})"
            return code, torch.randint(low, high, size).to(tensor.dtype)
        inferred = torch.int64 if not (tensor.is_floating_point() or tensor.is_complex()) else torch.float32
        inferred = torch.bool if tensor.dtype == torch.bool else inferred
        written = str(tensor.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
        return f"torch.tensor({written}{_dtype(tensor, inferred)})", tensor.clone()


def _dtype(tensor: Tensor, default: torch.dtype) -> str:
    return "" if tensor.dtype == default else f", dtype={tensor.dtype}"
