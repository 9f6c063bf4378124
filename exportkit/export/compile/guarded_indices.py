"""Brings indices into range before eager's own kernels read them, where compiled code calls these.

On a GPU, such a kernel ends the CUDA context at an index out of range, or at a negative number of repetitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops

from exportkit.export.torch_patches.dispatch import by_name
from exportkit.export.torch_patches.patched import Function, all_patched

_ALONG = frozenset({"gather", "index_select", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add"}) | {
    "scatter_reduce"
}
_BY_LIST = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})
_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
_CLASSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_POOLS = frozenset({"max_unpool2d", "max_unpool3d"})


def guarded_indices() -> AbstractContextManager[None]:
    """Gives eager's kernels indices in range while the block runs; the code refuses others (`refusing_code`)."""
    return all_patched(
        ("FallbackKernel.create", _with_guards),
        ("IndexPutFallback.__init__", _put),
        ("ScatterFallback.__init__", _scattered),
    )


def _with_guards(create: Function, cls: type, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(kernel, torch._ops.OpOverload) or kernel.namespace != "aten":
        return create(cls, kernel, *args, **kwargs)
    names = [argument.name for argument in kernel._schema.arguments]
    given = by_name(kernel, args, kwargs)
    changed = {name: _guard(value, *bounds) for name, value, bounds in _bounds(kernel, given)}
    if indices := given.get("indices") if _plain_name(kernel) in _BY_LIST else None:
        changed["indices"] = _guard_list(given["self"], indices)
    args = tuple(changed.get(name, value) for name, value in zip(names, args))
    return create(cls, kernel, *args, **{**kwargs, **{n: v for n, v in changed.items() if n in kwargs}})


def _put(make: Function, node: Any, operator: Any, target: Any, indices: Any, *rest: Any) -> None:
    make(node, operator, target, _guard_list(target, indices), *rest)


def _scattered(
    make: Function, node: Any, operator: Any, target: Any, dim: int, index: Any, *rest: Any, **options: Any
) -> None:
    make(node, operator, target, dim, _guard(index, 0, _size(target, dim)), *rest, **options)


def _plain_name(kernel: torch._ops.OpOverload) -> str:
    return kernel._schema.name.partition("::")[2].rstrip("_")


def _bounds(kernel: torch._ops.OpOverload, given: dict[str, Any]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yields an operator's tensors of indices by name, each with where its range begins and ends."""
    name = _plain_name(kernel)
    if name in _ALONG:
        yield "index", given["index"], (0, _size(given["self"], given["dim"]))
    elif name == "embedding":
        yield "indices", given["indices"], (0, _size(given["weight"], 0))
    elif name in _BAGS:
        yield "indices", given["indices"], (0, _size(given["weight"], 0))
        yield "offsets", given["offsets"], (0, _size(given["indices"], 0) + 1)
    elif name in ("take", "put"):
        count = sympy.prod(given["self"].get_size())
        yield "index", given["index"], (-count, count)
    elif name in _CLASSES:
        classes = _size(given["self"], 0 if len(given["self"].get_size()) == 1 else 1)
        yield "target", given["target"], (0, classes, given["ignore_index"])
    elif name in _POOLS:
        yield "indices", given["indices"], (0, sympy.prod(given["output_size"]))
    elif name == "repeat_interleave":
        yield "repeats", given["repeats"], (0, None)
    elif name == "bincount":
        yield "self", given["self"], (0, None)


def _guard_list(source: Any, indices: Any) -> list[Any]:
    """Guards the indices of `source[...]`. A mask is one for several dimensions."""
    guarded: list[Any] = []
    dim = 0
    for index in indices:
        if index is None:
            guarded.append(index)
            dim += 1
        elif index.get_dtype() in (torch.bool, torch.uint8):
            guarded.append(index)
            dim += len(index.get_size())
        else:
            size = _size(source, dim)
            guarded.append(_guard(index, -size, size))
            dim += 1
    return guarded


def _size(value: Any, dim: int) -> sympy.Expr:
    sizes = value.get_size()
    return sympy.sympify(sizes[dim]) if sizes else sympy.Integer(1)


def _guard(index: Any, begin: Any, end: Any, besides: int | None = None) -> Any:
    """Returns indices from `begin` to before `end`, None without an end, or `besides`. The code refuses others."""
    if index.get_dtype().is_floating_point or index.get_dtype() == torch.bool:
        return index
    load, dtype = index.make_loader(), index.get_dtype()
    begin, end = sympy.sympify(begin), sympy.Integer(2**62) if end is None else sympy.sympify(end)

    def inner(idx: Any) -> Any:
        value = ops.to_dtype(load(idx), torch.int64)
        first, last = ops.index_expr(begin, torch.int64), ops.index_expr(end - 1, torch.int64)
        wraps = begin == -end
        offset = value if wraps else ops.sub(value, first)
        within = ops.maximum(ops.minimum(value, last), first)
        if besides is not None:
            free = ops.eq(value, ops.constant(besides, torch.int64))
            offset = ops.where(free, ops.constant(0, torch.int64), offset)
            within = ops.where(free, value, within)
        ops.indirect_indexing(offset, end if wraps else end - begin, True, wraps)
        return ops.to_dtype(within, dtype)

    return ir.Pointwise.create(device=index.get_device(), dtype=dtype, inner_fn=inner, ranges=list(index.get_size()))
