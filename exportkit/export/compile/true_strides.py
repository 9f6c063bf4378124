"""Gives results of torch's own kernels the strides that they have, where torch describes them with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch._inductor import lowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.export.sizes.shapes import expression_of
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.torch_patches.patched import Function, patched

_Order: TypeAlias = tuple[int, ...]  # the dimensions as they lie in memory, the one with the greatest stride first
_Call: TypeAlias = tuple[Any, ...]  # an operator, and its arguments that are no tensors


@contextmanager
def true_strides(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Lets code read the results of kernels that it calls, such as `unique(dim=1)`'s, where they are.

    The kernels are called with the example inputs for that, if the program has any whose code Inductor does not write.
    """
    orders: dict[_Call, Sequence[_Order | None]] = {}
    # Without values, code for a GPU is compiled that is not here.
    runs = not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(program.example_inputs))
    if runs and any(_falls_back(node.target) for node in program.graph.nodes):
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, program.example_inputs)
        with torch.no_grad(), watched_by(_Looking(orders)):
            program.module(check_guards=False)(*args, **kwargs)
    if not orders:
        yield
        return

    def corrected(dispatch: Function, mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = dispatch(mode, func, types, args, kwargs)
        found = orders.get(_call(func, args, kwargs)) if _falls_back(func) else None
        if found is None:
            return result
        with mode:
            laid_out = [_laid_out(each, order) for each, order in zip(_results(result), found)]
        return laid_out[0] if isinstance(result, torch.Tensor) else type(result)(laid_out)

    with patched("FakeTensorMode.dispatch", corrected):
        yield


def _falls_back(target: object) -> bool:
    """Returns whether compiled code calls an operator of torch."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target not in lowering.fallbacks:
        return False
    return not target.is_view and not target._schema.is_mutable


class _Looking(OperatorMode):
    """Looks for kernels whose results lie in memory otherwise than torch says."""

    def __init__(self, orders: dict[_Call, Sequence[_Order | None]]) -> None:
        super().__init__()
        self._orders = orders

    def operator(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        result = func(*args, **kwargs)
        if _falls_back(func) and (said := _described(func, args, kwargs)) is not None:
            found = [_true_order(real, fake) for real, fake in zip(_results(result), _results(said))]
            if any(found):
                self._orders[_call(func, args, kwargs)] = found
        return result


def _described(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Returns what torch says of a result; None if it says nothing without the values."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        given = tree_map_only(torch.Tensor, lambda each: mode.from_tensor(each, static_shapes=True), (args, kwargs))
        try:
            return func(*given[0], **given[1])
        except Exception:  # torch has several, for what depends on values
            return None


def _true_order(real: object, fake: object) -> _Order | None:
    """Returns how a result lies in memory, if not as its fake says. Nothing is known of one with gaps."""
    if not isinstance(real, torch.Tensor) or not isinstance(fake, FakeTensor) or not real.numel():
        return None
    known = {expression_of(said): size for said, size in zip(fake.shape, real.shape)}
    said = [expression_of(stride).xreplace(known) for stride in fake.stride()]
    if all(size == 1 or one == other for size, one, other in zip(real.shape, said, real.stride())):
        return None
    order = tuple(sorted(range(real.ndim), key=real.stride().__getitem__, reverse=True))
    return order if real.permute(order).is_contiguous() else None


def _results(answer: Any) -> Sequence[Any]:
    return (answer,) if isinstance(answer, torch.Tensor) else answer


def _laid_out(fake: Any, order: _Order | None) -> Any:
    if order is None:
        return fake
    return torch.empty_permuted(fake.shape, order, dtype=fake.dtype, device=fake.device)


def _call(func: object, args: Any, kwargs: Any) -> _Call:
    return (func, *(each for each in tree_leaves((args, kwargs)) if not isinstance(each, (torch.Tensor, torch.SymInt))))
