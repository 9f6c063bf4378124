"""Keeps sizes in what functions make of them, where torch.export or Python makes numbers of the example's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._library.fake_impl import FakeImplCtx
from torch.utils._pytree import tree_any

from exportkit.export.torch_patches.patched import Function, patched
from exportkit.export.torch_patches.size_arithmetic import SYMBOLS


@contextmanager
def sizes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Keeps sizes in torch.as_tensor([h, w]) and its like, torch.linspace(0, 1, h), and in the model's files in len(x).

    So do transformers' torch_int(h) and torch_float(h) there, which are Python's int(h) and float(h) otherwise.
    """
    files = {type(module).__module__ for module in model.modules()} & set(sys.modules)
    replaced = [
        (known, name, known.get(name))
        for known in (vars(sys.modules[file]) for file in files)
        for name in _FUNCTIONS
        if (name in known) != (name == "len")
    ]
    for known, name, _ in replaced:
        known[name] = _FUNCTIONS[name]
    try:
        with patched("_NonStrictTorchFunctionHandler._override", _keeping_sizes):
            yield
    finally:
        for known, name, before in replaced:
            if before is None:
                del known[name]
            else:
                known[name] = before


def _length(value: Any) -> Any:
    """Python lets the length of a tensor be a number only."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "len": _length,
    "torch_int": torch.sym_int,
    "torch_float": torch.sym_float,
}


def _keeping_sizes(override: Function, handler: object, func: Any, args: Any, kwargs: Any) -> Any:
    if func in _INSTEAD and tree_any(lambda leaf: isinstance(leaf, SYMBOLS), (args, kwargs)):
        func = _INSTEAD[func]
    return override(handler, func, args, kwargs)


def _new_tensor(like: torch.Tensor, data: Any, **named: Any) -> torch.Tensor:
    return torch._refs.tensor(data, **{"dtype": like.dtype, "device": like.device, **named})  # as torch.export does


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **named: Any) -> torch.Tensor:
    """Computes as eager's kernel for floating point does. torch's own makes numbers of symbols, and fixes the sizes."""
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point or named.get("out") is not None:
        return torch.linspace(start, end, steps, dtype=dtype, **named)
    position = torch.arange(steps, dtype=torch.promote_types(dtype, torch.float32), **named)
    step = (end - start) / torch.sym_max(steps - 1, 1)
    # From both ends, so that the last is exact. The first alone is `start`.
    rising, falling = start + step * position, end - step * (steps - 1 - position)
    return torch.where(position < torch.sym_max(steps // 2, 1), rising, falling).to(dtype)


_INSTEAD: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.as_tensor: torch.tensor,
    torch.asarray: torch.tensor,
    torch.Tensor.new_tensor: _new_tensor,
    torch.linspace: _linspace,
}


def from_zero() -> AbstractContextManager[None]:
    """Lets sizes that depend on data begin at 0 while the block runs. A least value that a fake kernel names stays.

    `create_unbacked_symint()`, the older name of `new_dynamic_size()`, takes 2 for the least value. Kernels do not know
    it: they find one box or none, and compiled code would refuse that.
    """
    return patched("FakeImplCtx.create_unbacked_symint", _of_any_size)


def _of_any_size(_: object, context: FakeImplCtx, *, min: int = 0, max: int | None = None) -> Any:
    return context.new_dynamic_size(min=min, max=max)
