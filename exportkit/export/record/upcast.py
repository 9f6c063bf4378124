"""A mode in which a model computes in a wider dtype than its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from exportkit.export.torch_patches.dispatch import UncompiledMode, mapped, written_leaves

# A cast to one of these is a choice of precision, and is upcast. A cast to float8 or to an integer changes what the
# model computes, and stays.
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

LARGE_BYTES = 1 << 30  # of all parameters in the wide dtype, which may be four times the model

_aten = torch.ops.aten
_CHOOSING = (_aten.embedding.default, _aten.index_select.default)  # of the first argument, exact in any dtype


class ParameterWrittenError(Exception):
    """A model writes to a parameter that was left narrow. Its reference is computed with all of it upcast instead."""


class Upcast(UncompiledMode):
    """Computes each operator in a wider dtype, also where the model's code names a narrower one.

    Attributes:
        narrowest: The least precise dtype of the model: that of its tensors, or one that its code named.
        met_control_flow: Whether the model called torch.cond or its like.
        coarsest: The least precise dtype that an operator was computed in.
        decides: Whether the model chose by floating values: it compared, ranked or rounded them to whole numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, wide: torch.dtype, narrow: torch.dtype, *, lazily: bool = False) -> None:
        """Upcasts to `wide` what a model computes in `narrow` or its like.

        `lazily`: parameters are upcast where they are used, and none stays. A model that writes to one raises
        ParameterWrittenError then, and one that compares their dtype with that of inputs, as torch's convolutions do,
        raises torch's error.
        """
        super().__init__()
        self.narrowest = narrow
        self.met_control_flow = self.decides = False
        self.coarsest = wide
        self._wide = wide
        self._tried = tuple(dict.fromkeys((wide, torch.float32, narrow)))
        self._lazily = lazily
        self._narrow: set[torch.Tensor] = set()  # parameters, and views of them, that are not upcast

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what takes a parameter's place in the model."""
        return self._left_narrow(tensor.detach()) if self._lazily else cast(tensor.detach(), self._wide)

    def _left_narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        self._narrow.add(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # an exported program checks the dtypes that it was traced with
        self.met_control_flow |= isinstance(func, torch._ops.HigherOrderOperator)
        given = mapped(torch.dtype, self._wider, (args, kwargs or {}))
        if self._narrow and isinstance(func, torch._ops.OpOverload):
            if func._schema.is_mutable and not self._narrow.isdisjoint(written_leaves(func, args, kwargs or {})):
                raise ParameterWrittenError("a parameter that is upcast where it is used cannot be written")
            if args and isinstance(args[0], torch.Tensor) and args[0] in self._narrow:
                if func in _CHOOSING:
                    return cast(func(*args, **(kwargs or {})), self._wide)
                if func.is_view:
                    return mapped(torch.Tensor, self._left_narrow, func(*args, **(kwargs or {})))
        refusal: Exception | None = None
        for dtype in self._tried:
            try:
                wide_args, wide_kwargs = wide = mapped(torch.Tensor, partial(cast, dtype=dtype), given)
                result = func(*wide_args, **wide_kwargs)
            except (RuntimeError, NotImplementedError) as error:
                refusal = refusal or error  # an operator without a kernel for this dtype
                continue
            self._write_back(func, given, wide)
            self.coarsest = max(self.coarsest, dtype, key=lambda each: torch.finfo(each).eps)
            self.decides = self.decides or _decides(func, given, result)
            return mapped(torch.Tensor, lambda tensor: cast(tensor, self._wide), result)
        assert refusal is not None
        raise refusal

    def _write_back(self, func: Any, given: Any, wide: Any) -> None:
        """Copies what an operator wrote into a cast copy to the tensor that it was to write into."""
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor, copy in zip(tree_leaves(given), tree_leaves(wide)):
                if isinstance(tensor, torch.Tensor) and copy is not tensor:
                    tensor.copy_(copy)

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in PRECISIONS:
            return dtype
        self.narrowest = max(self.narrowest, dtype, key=lambda each: torch.finfo(each).eps)
        return self._wide


_WHOLE = {"floor", "ceil", "round", "trunc", "sign", "floor_divide", "remainder", "fmod"}
_BESIDE = re.compile("pool|attention|norm|rnn|gru|lstm")  # what gives integers beside its values, for its gradient


def _decides(func: Any, given: Any, result: Any) -> bool:
    """Whether an operator makes whole numbers or truths of floating ones."""
    name = str(func).split(".")[1].rstrip("_") if isinstance(func, torch._ops.OpOverload) else ""
    makes = not _BESIDE.search(name) and any(_is(leaf, floating=False) for leaf in tree_leaves(result))
    return (makes or name in _WHOLE) and any(_is(leaf, floating=True) for leaf in tree_leaves(given))


def _is(value: Any, *, floating: bool) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() is floating


def is_large(parameters: Iterable[torch.Tensor], wide: torch.dtype) -> bool:
    """Returns whether a model's parameters would take more than LARGE_BYTES in a dtype."""
    return sum(tensor.numel() for tensor in parameters) * wide.itemsize > LARGE_BYTES


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of floating numbers in another dtype, and any other as it is."""
    return tensor.to(dtype) if tensor.dtype in PRECISIONS and tensor.dtype != dtype else tensor
