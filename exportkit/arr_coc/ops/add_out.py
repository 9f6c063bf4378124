"""a + b into an existing tensor, an operator that writes to an argument."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, check, operator

_add_out = operator("add_out")

_MAX_DIMS = 25


def add_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a + b to `out`, without broadcasting.

    `out` keeps its strides. It may be `a` or `b` itself. If it overlaps an input in another way, the result is as if
    the inputs had been read first. It has no gradient: use `a + b` if one is needed.

    Args:
        a: At most 25 dimensions.
        b: The other summand.
        out: The sum. Each stride must step past the extent of the smaller ones, as in every slice, transpose or
            permutation of a contiguous tensor, so that no two elements share memory.

    Raises:
        RuntimeError: An argument requires a gradient, or elements of `out` share memory (such as in an expanded
            tensor).
    """
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or out.requires_grad):
        raise RuntimeError("add_out: an argument requires a gradient, but add_out has none; use a + b")
    _add_out(a, b, out)


def add_out_reference(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Computes `add_out` in ATen."""
    out.copy_(a + b)


def _has_distinct_elements(tensor: Tensor) -> bool:
    """Returns whether every stride steps past the extent of the smaller ones."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    reach = 0
    for stride, size in sorted((st, s) for st, s in zip(tensor.stride(), tensor.shape) if s != 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _check_strides(op: str, a: Tensor, out: Tensor, **_: Tensor) -> None:
    check(a.dim() <= _MAX_DIMS, f"{op}: a must have at most {_MAX_DIMS} dimensions, got shape ", a.shape)
    strides = f" with strides [{', '.join(str(stride) for stride in out.stride())}]"
    distinct = _has_distinct_elements(out)
    check(distinct, f"{op}: elements of out must not share memory, got shape ", out.shape, strides)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for shape in [(2, 3, 8), (5, 4, 8), (1, 7), (1,), (0, 3), (2, 0, 3), (5, 17, 33), (), (2, 4097)]:
        a, b, out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        yield Sample(f"shape {list(shape)}", (a, b, out))
    a, b = (torch.randn(2, 3, 4, 5, device=device, dtype=dtype) for _ in range(2))
    yield Sample("out is channels_last", (a, b, torch.empty_like(a, memory_format=torch.channels_last)))
    yield Sample("out is transposed, b is a permutation of it", (a.mT, b.permute(0, 1, 3, 2), torch.empty_like(a).mT))
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0, 6e4]], device=device, dtype=dtype)
    yield Sample("infinities, NaN, overflow of float16", (special, special.flip(-1), torch.zeros_like(special)))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    a, b = torch.rand(2, 3, device=device), torch.rand(2, 3, device=device)
    expanded = torch.rand(1, 3, device=device).expand(2, 3)
    yield Refusal("out expanded", (a, b, expanded), r"must not share memory, got .* with strides \[0, 1\]")
    overlapping = torch.rand(4, device=device).as_strided((2, 3), (1, 1))
    yield Refusal("out overlapping", (a, b, overlapping), r"must not share memory, got .* with strides \[1, 1\]")
    deep = torch.rand([1] * 26, device=device)
    yield Refusal("26 dimensions", (deep, deep, deep.clone()), "at most 25 dimensions")


SPEC = ArrCocSpec(
    wrapper=add_out,
    reference=add_out_reference,
    layout=Layout(inputs={"a": "...", "b": "...", "out": "..."}, further=_check_strides),
    samples=_samples,
    more_refusals=_refusals,
    autocast=None,
)
