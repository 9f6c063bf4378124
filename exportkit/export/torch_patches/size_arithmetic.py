"""Computes with small integer tensors whose elements are sizes, as eager would once the sizes are numbers."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST = 4096  # elements of such a tensor


class UnknownValueError(Exception):
    """A value follows from more than what is fixed, or by an operator that is not known here."""


class SizeArithmetic:
    """Computes with tensors of numbers and symbols.

    In place of its numbers, such a tensor has their places in one list as elements. So torch's own views, copies and
    writes do with the places what they do with numbers.
    """

    def __init__(self, tracing: AbstractContextManager[Any]) -> None:
        """Has no numbers yet."""
        self._tracing = tracing
        self._numbers: list[Any] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the places for a tensor of integers or truths. Raises UnknownValueError."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > _MOST:
            raise UnknownValueError
        return self._placed(np.array(tensor.tolist(), dtype=object).reshape(tensor.shape))

    def number(self, places: torch.Tensor) -> Any:
        """Returns the number of a tensor with one element."""
        return self._numbers[int(places.item())]

    def run(self, node: torch.fx.Node, known: Mapping[torch.fx.Node, Any]) -> Any:
        """Returns the places for what a node answers."""
        args, kwargs = tree_map_only(torch.fx.Node, known.__getitem__, (node.args, node.kwargs))
        operator: Any = node.target
        if operator is python.getitem:
            return args[0][args[1]]
        name = operator._schema.name.removeprefix("aten::")
        dtypes = {value.dtype for value in tree_leaves(node.meta["val"])}
        if any(dtype.is_complex or dtype.is_floating_point for dtype in dtypes):
            raise UnknownValueError
        if name in _ITSELF | _COPIES:
            return args[0].clone() if name in _COPIES else args[0]
        symbolic = tree_any(lambda leaf: isinstance(leaf, SYMBOLS), (args, kwargs))
        if (operator.is_view or name in _MOVES) and not symbolic:
            return operator(*args, **kwargs)
        if name in _CHOICES and not symbolic:
            return operator(args[0], *tree_map_only(torch.Tensor, self._indices, args[1:]))
        if name in ("scalar_tensor", "full", "full_like", "new_full"):
            return self._placed(self._array(args[-1])).expand(node.meta["val"].shape).clone()
        if operator._schema.is_mutable:
            assigned = {"copy_": args[-1], "fill_": args[-1], "zero_": 0}
            value = self._array(assigned[name]) if name in assigned else self._computed(name[:-1], args, kwargs)
            return args[0].copy_(self._placed(value))
        if tree_any(lambda leaf: isinstance(leaf, torch.Tensor), args):
            return self._placed(self._computed(name, args, kwargs))
        if symbolic:
            raise UnknownValueError
        return self.of(operator(*args, **{**kwargs, "device": "cpu"}))  # such as arange(4)

    def _computed(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> np.ndarray:
        dims = args[1] if len(args) > 1 else ()
        (dim,) = dims if isinstance(dims, (list, tuple)) and len(dims) == 1 else (dims,)
        if name in _BY_ELEMENT and kwargs in ({}, {"rounding_mode": "floor"}):
            function, arrays = np.frompyfunc(_BY_ELEMENT[name], len(args), 1), [self._array(arg) for arg in args]
        elif name in _RUNNING and not kwargs:
            function, arrays = partial(_RUNNING[name].accumulate, axis=dim), [self._array(args[0])]
        elif name in _REDUCED and not kwargs and isinstance(dim, int):
            keepdims = args[2:] == (True,)
            function, arrays = partial(_REDUCED[name].reduce, axis=dim, keepdims=keepdims), [self._array(args[0])]
        elif name in _REDUCED and not kwargs and not dim:
            function, arrays = _REDUCED[name].reduce, [self._array(args[0]).flatten()]
        else:
            raise UnknownValueError
        with self._tracing:
            return np.asarray(function(*arrays), dtype=object)

    def _array(self, value: Any) -> np.ndarray:
        """Returns the numbers of a tensor of places, or a number, as an array."""
        is_tensor = isinstance(value, torch.Tensor)
        array = np.empty(value.shape if is_tensor else (), dtype=object)
        for index in np.ndindex(array.shape):
            array[index] = self._numbers[int(value[index])] if is_tensor else value
        return array

    def _placed(self, array: np.ndarray) -> torch.Tensor:
        first = len(self._numbers)
        self._numbers += array.flatten().tolist()
        return torch.arange(first, len(self._numbers)).reshape(array.shape)

    def _indices(self, places: torch.Tensor) -> torch.Tensor:
        numbers = self._array(places)
        if any(isinstance(number, SYMBOLS) for number in numbers.flat):
            raise UnknownValueError
        return torch.tensor(numbers.tolist())


def _differ(one: Any, other: Any) -> Any:
    """Python takes a truth that is a symbol for another thing than 0, whatever it is."""
    return one if isinstance(one, torch.SymBool) and other == 0 else one != other


# By what an operator does to integers, where they keep their dtype.
_ITSELF = {"to", "type_as", "contiguous", "detach_", "lift_fresh"}
_COPIES = {"clone", "_to_copy", "lift_fresh_copy", "detach", "new_tensor"}
_MOVES = {"cat", "stack", "flip", "roll", "repeat", "reshape", "flatten", "meshgrid", "tile", "hstack", "vstack"}
_CHOICES = {"index", "index_select", "gather", "take"}
_BY_ELEMENT: Mapping[str, Callable[..., Any]] = {
    **{"add": python.add, "sub": python.sub, "mul": python.mul, "neg": python.neg, "remainder": python.mod},
    **{"floor_divide": python.floordiv, "div": python.floordiv, "rsub": lambda a, b: b - a},
    **{name: getattr(python, name) for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": _differ,
    **{"minimum": torch.sym_min, "maximum": torch.sym_max},
}
_RUNNING: Mapping[str, np.ufunc] = {"cumsum": np.add, "cumprod": np.multiply}
_REDUCED: Mapping[str, np.ufunc] = {
    **{"sum": np.add, "prod": np.multiply},
    **{name: np.frompyfunc(torch.sym_max, 2, 1) for name in ("max", "amax")},
    **{name: np.frompyfunc(torch.sym_min, 2, 1) for name in ("min", "amin")},
}
