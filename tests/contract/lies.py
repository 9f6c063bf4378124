"""Operators that lie in one way each, and honest twins. All take a matrix and, if they tell the truth, double it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import Sample
from exportkit.contract.subject import Subject

_LIBRARY = torch.library.Library("lies", "DEF")
_ONE = "(Tensor x) -> Tensor"


def operator(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = torch.empty_like,
    schema: str = _ONE,
    backward: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    _LIBRARY.define(name + schema)

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # as a kernel in C++
            return kernel(*args)

    _LIBRARY.impl(name, below_autograd, "CPU")
    if fake is not None:
        torch.library.register_fake(f"lies::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"lies::{name}",
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=_LIBRARY,
        )
    return getattr(torch.ops.lies, name).default


def matrices(*dtypes: torch.dtype) -> tuple[Sample, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (2, 3), (5, 7), (0, 3), (3, 64)]
    return tuple(
        Sample(f"{shape}", (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype),))
        for dtype in dtypes or (torch.float32, torch.float64)
        for shape in shapes
    )


def doubled(x: Tensor) -> Tensor:
    return x.contiguous() * 2


def contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class Lie:
    """What is wrong, which check must find it, and the smallest call that shows it."""

    check: str
    subject: Subject
    smallest: str
    only: tuple[str, ...] = ()


def _subject(overload: torch._ops.OpOverload, reference: Callable[..., Any] | None = None) -> Subject:
    return Subject(overload, matrices(), reference)


# --- wrong shape only at odd sizes


def _halved(x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2].clone(memory_format=torch.contiguous_format)


def _halved_rounding_up(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], (x.shape[1] + 1) // 2)


def _halved_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


EVEN = (Sample("(4, 6)", (torch.ones(4, 6),)), Sample("(2, 8)", (torch.ones(2, 8),)))
"""Calls at which the lie about odd sizes does not show."""


# --- dtype under autocast


def _half_under_autocast(x: Tensor) -> Tensor:
    return doubled(x).bfloat16() if torch.is_autocast_enabled("cpu") else doubled(x)


# --- hidden mutation, from the third column on


def _mutating(x: Tensor) -> Tensor:
    result = doubled(x)
    if x.dim() == 2 and x.shape[1] > 2 and x.shape[0]:
        x[0, 2] = 0
    return result


# --- an output that is the input


def _aliasing(x: Tensor) -> Tensor:
    return x if x.dim() and x.shape[0] > 1 else x.clone()


# --- strides that are taken for granted


def _taking_strides_for_granted(x: Tensor) -> Tensor:
    steps, step = [], 1
    for size in reversed(x.shape):
        steps.insert(0, step)
        step *= max(size, 1)
    return x.as_strided(x.shape, steps) * 2


# --- one buffer for all threads

_BUFFERS: dict[Any, Tensor] = {}


def _racing(x: Tensor) -> Tensor:
    buffer = _BUFFERS.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
    for own, row in zip(buffer.view(-1), x.reshape(-1)):
        own.copy_(row)
    return buffer * 2


_OWN = threading.local()


def _with_a_buffer_for_each_thread(x: Tensor) -> Tensor:
    _OWN.buffer = torch.empty(x.shape, dtype=x.dtype)
    for own, row in zip(_OWN.buffer.view(-1), x.reshape(-1)):
        own.copy_(row)
    result, _OWN.buffer = _OWN.buffer * 2, None
    return result


# --- NaN


def _laundering(x: Tensor) -> Tensor:
    return doubled(x).nan_to_num(posinf=torch.inf, neginf=-torch.inf)


# --- rows that look at one another


def _coupled(x: Tensor) -> Tensor:
    return doubled(x) + x.amax() if x.shape[0] > 2 else doubled(x)


# --- a leak

LEAKED: list[Tensor] = []


def _leaking(x: Tensor) -> Tensor:
    LEAKED.append(x.clone())
    return doubled(x)


# --- chance


def _by_chance(x: Tensor) -> Tensor:
    return doubled(x) + torch.rand(()).to(x)


def _call(name: str, rows: int, columns: int) -> str:
    return f"torch.manual_seed(0)\ntorch.ops.lies.{name}(torch.randn({rows}, {columns}))"


TEN = {
    "wrong shape only at odd sizes": Lie(
        "fake-shape",
        Subject(operator("halved", _halved, _halved_rounding_up), EVEN),
        _call("halved", 1, 1),
    ),
    "dtype under autocast": Lie(
        "autocast",
        _subject(operator("half_under_autocast", _half_under_autocast, contiguous)),
        "torch.randn(1, 1)",
    ),
    "hidden mutation": Lie(
        "mutation",
        _subject(operator("mutating", _mutating, contiguous)),
        "torch.randn(1, 3)",
    ),
    "aliasing output": Lie(
        "aliasing",
        _subject(operator("aliasing", _aliasing, torch.empty_like)),
        "torch.randn(2, 1)",
    ),
    "stride assumption": Lie(
        "strides",
        _subject(operator("taking_strides_for_granted", _taking_strides_for_granted, contiguous)),
        "torch.randn(1, 1)",
    ),
    "race": Lie("threads", _subject(operator("racing", _racing, contiguous)), "torch.randn("),
    "NaN laundering": Lie(
        "nan",
        _subject(operator("laundering", _laundering, contiguous), doubled),
        "torch.randn(1, 1)",
    ),
    "batch coupling": Lie("batch", _subject(operator("coupled", _coupled, contiguous)), "torch.randn(3, 1)"),
    "leak": Lie("leak", _subject(operator("leaking", _leaking, contiguous)), "torch.randn(1, 1)"),
    "non-determinism": Lie(
        "determinism",
        _subject(operator("by_chance", _by_chance, contiguous)),
        "torch.randn(1, 1)",
    ),
}
"""The ten lies of the contract's promise."""


def _double_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2


HONEST = {
    "shape": Subject(operator("halved_honest", _halved, _halved_fake), EVEN),
    "double": Subject(operator("doubled", doubled, contiguous, backward=_double_backward), matrices(), doubled),
    "buffer of its thread": _subject(operator("own_buffer", _with_a_buffer_for_each_thread, contiguous)),
}
"""Operators that keep every promise, near the lies."""
