"""Operators that break one promise each, and honest twins. All take a matrix and, if they are right, double it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample

COMPILERS = {"compiles", "exports", "opcheck-dynamic"}
WITHOUT_COMPILERS = [name for name in checks() if name not in COMPILERS]
"""What the compiler finds is tested apart: it takes seconds for each operator."""

_LIBRARY = torch.library.Library("faulty", "DEF")
_ONE = "(Tensor x) -> Tensor"


def operator(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = torch.empty_like,
    schema: str = _ONE,
    backward: Callable[..., Any] | None = None,
    key: str = "CPU",
) -> torch._ops.OpOverload:
    _LIBRARY.define(name + schema)

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # as a kernel in C++
            return kernel(*args)

    _LIBRARY.impl(name, below_autograd, key)
    if fake is not None:
        torch.library.register_fake(f"faulty::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"faulty::{name}",
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=_LIBRARY,
        )
    return getattr(torch.ops.faulty, name).default


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
class Fault:
    """What is wrong, which check must find it, and the smallest call that shows it."""

    check: str
    subject: Subject
    smallest: str


def fault(
    check: str,
    smallest: str,
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = contiguous,
    *,
    reference: Callable[..., Any] | None = None,
    schema: str = _ONE,
    backward: Callable[..., Any] | None = None,
    calls: tuple[Sample, ...] | None = None,
) -> Fault:
    """A fault of an operator that is registered under this name."""
    overload = operator(name, kernel, fake, schema, backward)
    return Fault(check, Subject(overload, matrices() if calls is None else calls, reference), smallest)


def _half_under_autocast(x: Tensor) -> Tensor:
    return doubled(x).bfloat16() if torch.is_autocast_enabled("cpu") else doubled(x)


def _mutating(x: Tensor) -> Tensor:
    result = doubled(x)
    if x.dim() == 2 and x.shape[1] > 2 and x.shape[0]:
        x[0, 2] = 0
    return result


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


def _laundering(x: Tensor) -> Tensor:
    return doubled(x).nan_to_num(posinf=torch.inf, neginf=-torch.inf)


def _by_chance(x: Tensor) -> Tensor:
    return doubled(x) + torch.rand(()).to(x)


def _writing_beside(x: Tensor) -> Tensor:
    result = doubled(x)
    if x.numel() and x.storage_offset():
        x.as_strided((1,), (1,), x.storage_offset() - 1).zero_()
    return result


def _writing_nothing(x: Tensor, out: Tensor) -> None:
    doubled(x)


def _written(x: Tensor, out: Tensor) -> None:
    _written_fake(x, out)
    out.copy_(x * 2)


def _written_fake(x: Tensor, out: Tensor) -> None:
    torch._check(x.shape == out.shape and x.dtype == out.dtype, lambda: "x and out must be alike")


def _infinite(x: Tensor) -> Tensor:
    return doubled(x).clamp(-1e30, 1e30)


def _not_filled(x: Tensor) -> Tensor:
    if x.numel() == 0:
        raise RuntimeError("the grid is empty")
    return doubled(x)


def _two() -> tuple[Sample, ...]:
    return tuple(Sample(s.label, (s.args[0], s.args[0] + 1)) for s in matrices())


def _alike(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape == y.shape and x.dtype == y.dtype, lambda: "x and y must be alike")
    return x.new_empty(x.shape)


def _add_taking_strides_of_the_first(x: Tensor, y: Tensor) -> Tensor:
    _alike(x, y)
    if x.is_contiguous():
        return x + y.as_strided(x.shape, x.stride(), y.storage_offset())
    return x.contiguous() + y.contiguous()


FAULTS = {
    "dtype under autocast": fault("autocast", "torch.randn(1, 1)", "half_under_autocast", _half_under_autocast),
    "hidden mutation": fault("mutation", "torch.randn(1, 3)", "mutating", _mutating),
    "race": fault("threads", "torch.ops.faulty.racing(", "racing", _racing),
    "NaN laundering": fault("nan", "torch.randn(1, 1)", "laundering", _laundering, reference=doubled),
    "non-determinism": fault("determinism", "torch.randn(1, 1)", "by_chance", _by_chance),
    "no fake": fault("fake-runs", "torch.randn(1, 1)", "without_fake", doubled, None),
    "writing beside the elements": fault("mutation", "torch.randn(1, 1)", "writing_beside", _writing_beside),
    "nothing is written": fault(
        "declared-mutation",
        "torch.tensor(",
        "writing_nothing",
        _writing_nothing,
        lambda x, out: None,
        schema="(Tensor x, Tensor(a!) out) -> ()",
        calls=_two(),
    ),
    "an infinity is clamped": fault("infinity", "torch.randn(1, 1)", "infinite", _infinite, reference=doubled),
    "strides of the first argument": fault(
        "strides",
        ".repeat_interleave",
        "strides_of_the_first",
        _add_taking_strides_of_the_first,
        _alike,
        schema="(Tensor x, Tensor y) -> Tensor",
        calls=_two(),
    ),
    "an empty tensor": fault(
        "empty", "torch.empty(", "not_filled", _not_filled, calls=tuple(c for c in matrices() if c.args[0].numel())
    ),
}
"""Those that tests/operators/planted does not have, or not with the smallest call that shows them."""


def _double_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2


HONEST = {
    "writes to an argument": Subject(
        operator("written", _written, _written_fake, "(Tensor x, Tensor(a!) out) -> ()"), _two()
    ),
    "double": Subject(operator("doubled", doubled, contiguous, backward=_double_backward), matrices(), doubled),
    "buffer of its thread": Subject(operator("own_buffer", _with_a_buffer_for_each_thread, contiguous), matrices()),
}
"""Operators that keep every promise, near the faulty ones."""
