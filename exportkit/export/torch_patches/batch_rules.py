"""Lets LayerNorm be traced under torch.vmap: torch's own rules ask for the sizes of its statistics as numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Size = int | torch.SymInt


@contextmanager
def varying_batches() -> Iterator[None]:
    """Lets sizes vary under vmap while the block runs."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's own rule is overridden
            torch.library.register_vmap("aten::native_layer_norm", _layer_norm, lib=library)
            torch.library.register_vmap("aten::native_layer_norm_backward", _layer_norm_backward, lib=library)
        yield
    finally:
        library._destroy()


def _layer_norm(
    info: object,
    in_dims: Sequence[int | None],
    input: Tensor,
    shape: Sequence[Size],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Computes what torch's rule computes. Weights that are not batched go into the kernel, as there."""
    size = info.batch_size  # type: ignore[attr-defined]  # torch declares no class of it
    rows = _first(input, in_dims[0], size)
    if in_dims[2] is None and in_dims[3] is None:
        return torch.native_layer_norm(rows, shape, weight, bias, eps), (0, 0, 0)
    out, mean, rstd = torch.native_layer_norm(rows, shape, None, None, eps)
    between = [1] * (rows.dim() - 1 - len(shape))
    if weight is not None:
        out = out * _first(weight, in_dims[2], size).view(size, *between, *shape)
    if bias is not None:
        out = out + _first(bias, in_dims[3], size).view(size, *between, *shape)
    return (out, mean, rstd), (0, 0, 0)


def _layer_norm_backward(
    info: object,
    in_dims: Sequence[int | None],
    gradient: Tensor,
    input: Tensor,
    shape: Sequence[Size],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """Computes what torch's rule computes: each member of the batch has its own gradients of the weights."""
    size = info.batch_size  # type: ignore[attr-defined]  # torch declares no class of it
    dims = (in_dims[0], in_dims[1], in_dims[3], in_dims[4])
    gradient, rows, mean, rstd = (_first(t, dim, size) for t, dim in zip((gradient, input, mean, rstd), dims))
    outer = tuple(range(1, rows.dim() - len(shape)))
    scaled = gradient
    if weight is not None:
        scaled = gradient * _first(weight, in_dims[5], size).view(size, *[1] * len(outer), *shape)
    found: list[Tensor | None] = [None, None, None]
    if wanted[0]:
        needs = [True, False, False]
        found[0] = torch.ops.aten.native_layer_norm_backward(scaled, rows, shape, mean, rstd, None, None, needs)[0]
    if wanted[1]:
        each = gradient * (rows - mean) * rstd
        found[1] = each.sum(outer) if outer else each
    if wanted[2]:
        found[2] = gradient.sum(outer) if outer else gradient
    return tuple(found), tuple(None if t is None else 0 for t in found)


def _first(tensor: Tensor, dim: int | None, size: Size) -> Tensor:
    """Returns a tensor whose batch is its first dimension."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0).contiguous()
