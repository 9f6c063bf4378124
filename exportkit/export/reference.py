"""Computes what eager should have answered: the same call in a wider dtype than the model's."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.accuracy import eager_error
from exportkit.export.call_signature import BoundCall
from exportkit.package.manifest import Accuracy, TensorOutput

# A cast to one of these is a choice of precision, and is widened. A cast to float8 or to an integer changes what the
# model computes, and stays.
_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


_TF32_EPS = 2.0**-10  # of a product's factors


@dataclass(frozen=True)
class References:
    """What eager should have answered in one call, for the outputs for which that is known.

    Attributes:
        dtype: The dtype that it was computed in.
        outputs: By output, on the CPU: a floating output in the dtype of a case's reference, or indices.
        accuracy: By output, eager's error; None for indices.
    """

    dtype: Literal["float64", "float32"]
    outputs: Mapping[str, torch.Tensor]
    accuracy: Mapping[str, Accuracy | None]


def references(
    model: torch.nn.Module,
    bound: BoundCall,
    eager: Sequence[torch.Tensor],
    outputs: Sequence[TensorOutput],
    wanted: Collection[str],
    *,
    tf32: bool = False,
) -> References | None:
    """Computes a call in float64, or in float32 where float64 does not work.

    A single operator that has no kernel for the wide dtype runs in float32, or in the model's dtype.

    Args:
        model: The model. It does not change.
        bound: The call, on the model's device.
        eager: The model's own outputs.
        outputs: The manifest's outputs.
        wanted: The names of the floating outputs that need a reference.
        tf32: Whether the model's own outputs may have been computed with TF32.

    Returns:
        The references. An output has none if eager is so far from it that both cannot be the same function: the model
        draws random numbers, or decides otherwise where two values are nearly equal. None if no output has one, or the
        model computes in the widest dtype already.
    """
    state = [*model.parameters(), *model.buffers()]
    dtypes = {tensor.dtype for tensor in (*state, *bound.tensors, *eager) if tensor.dtype in _PRECISIONS}
    if not wanted or not dtypes or len(eager) != len(outputs):
        return None
    narrow = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    by_name = {output.name: tensor.detach().cpu() for output, tensor in zip(outputs, eager)}
    for wide in (torch.float64, torch.float32):
        if torch.finfo(wide).eps >= torch.finfo(narrow).eps:
            return None
        # Where the mode itself fails, only the state and the inputs are widened.
        for mode in (_Widened(wide, narrow), None):
            try:
                computed = _computed(model, bound, wide, mode)
            except Exception:
                # The model's code may raise anything in another dtype, and its wide weights may not fit into memory.
                continue
            if len(computed) == len(outputs):
                known = {output.name: tensor.detach().cpu() for output, tensor in zip(outputs, computed)}
                least = max(torch.finfo(mode.narrowest if mode else narrow).eps, _TF32_EPS if tf32 else 0)
                name: Literal["float64", "float32"] = "float64" if wide is torch.float64 else "float32"
                return _credible(name, known, by_name, outputs, wanted, limit=2 * math.sqrt(least))
    return None


def _credible(
    dtype: Literal["float64", "float32"],
    computed: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    outputs: Sequence[TensorOutput],
    wanted: Collection[str],
    *,
    limit: float,
) -> References | None:
    """Returns the references that eager agrees with in half of its digits, and the indices that belong to them."""
    same = {name: _stored(tensor, eager[name]) for name, tensor in computed.items() if _same_form(tensor, eager[name])}
    found: dict[str, torch.Tensor] = {}
    accuracy: dict[str, Accuracy | None] = {}
    for output in outputs:
        rows_of = output.tolerance.rows_of
        if output.name not in wanted or output.name not in same or (rows_of is not None and rows_of not in same):
            continue
        error = eager_error(output, eager, same)
        if error.rms <= limit and math.isfinite(error.greatest):
            found[output.name], accuracy[output.name] = same[output.name], error
            if rows_of is not None:
                found[rows_of], accuracy[rows_of] = same[rows_of], None
    for output in outputs:
        if output.tolerance.ranking_of in found and output.name in same:
            found[output.name], accuracy[output.name] = same[output.name], None
    return References(dtype, found, accuracy) if found else None


def _same_form(computed: torch.Tensor, eager: torch.Tensor) -> bool:
    kinds = computed.dtype == eager.dtype or (computed.is_floating_point() and eager.is_floating_point())
    return kinds and computed.shape == eager.shape


def _stored(computed: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Returns a reference in the dtype that a case has it in. FORMAT.md says which."""
    if not eager.is_floating_point():
        return computed
    wide = torch.float64 if eager.dtype in (torch.float32, torch.float64) else torch.float32
    # Beyond the range of eager's dtype, such as the least number of the wide dtype in a mask, eager's is as good.
    greatest = torch.finfo(eager.dtype).max
    known = eager.double()
    beyond = (computed.double().abs() > greatest) & (known.abs() >= greatest) & (known.sign() == computed.sign())
    return torch.where(beyond, known, computed.double()).to(wide).contiguous()


def _computed(model: torch.nn.Module, bound: BoundCall, wide: torch.dtype, mode: _Widened | None) -> list[torch.Tensor]:
    tensors = tuple(_cast(tensor, wide).clone() for tensor in bound.tensors)
    args, kwargs = bound.with_tensors(tensors)
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    wider: dict[torch.Tensor, torch.Tensor] = {}
    for tensor in state.values():
        if tensor not in wider:
            wider[tensor] = _cast(tensor.detach(), wide)
    replaced = {name: wider[tensor] for name, tensor in state.items()}
    try:
        with torch.no_grad(), _default_dtype(wide), mode or nullcontext():
            result = torch.func.functional_call(model, replaced, args, kwargs, strict=False, tie_weights=False)
    finally:
        if mode is not None and mode.met_control_flow:
            torch.compiler.reset()  # torch.cond was compiled in the mode, and would be refused from now on
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Widened(TorchDispatchMode):
    """Computes each operator in a wider dtype, also where the model's code names a narrower one.

    Attributes:
        narrowest: The least precise dtype of the model: that of its tensors, or one that its code named.
        met_control_flow: Whether the model called torch.cond or its like.
    """

    supports_higher_order_operators = True

    def __init__(self, wide: torch.dtype, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrowest = narrow
        self.met_control_flow = False
        self._wide = wide
        self._tried = tuple(dict.fromkeys((wide, torch.float32, narrow)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # an exported program checks the dtypes that it was traced with
        self.met_control_flow |= isinstance(func, torch._ops.HigherOrderOperator)
        given = tree_map_only(torch.dtype, self._wider, (args, kwargs or {}))
        refusal: Exception | None = None
        for dtype in self._tried:
            cast_args, cast_kwargs = cast = tree_map_only(torch.Tensor, functools.partial(_cast, dtype=dtype), given)
            try:
                result = func(*cast_args, **cast_kwargs)
            except (RuntimeError, NotImplementedError) as error:
                refusal = refusal or error  # an operator without a kernel for this dtype
                continue
            _write_back(func, given, cast)
            return tree_map_only(torch.Tensor, lambda t: _cast(t, self._wide), result)
        assert refusal is not None
        raise refusal

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in _PRECISIONS:
            return dtype
        self.narrowest = max(self.narrowest, dtype, key=lambda each: torch.finfo(each).eps)
        return self._wide


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype in _PRECISIONS and tensor.dtype != dtype else tensor


def _write_back(func: Any, given: Any, cast: Any) -> None:
    """Copies what an operator wrote into a cast copy to the tensor that it was to write into."""
    if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
        for tensor, copy in zip(tree_leaves(given), tree_leaves(cast)):
            if isinstance(tensor, torch.Tensor) and copy is not tensor:
                tensor.copy_(copy)
