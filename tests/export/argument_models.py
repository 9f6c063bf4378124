"""A module that calls the operators of argument_kinds.cpp with every value that compiled code can pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec

SIZE, ROW = object(), object()
"""Stand for values that a call computes: its number of rows, and a tensor."""

VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [3, -(2**40)],
    "SymInt": [3, SIZE],
    "float": [0.5, 3, math.inf, -math.inf, math.nan],
    "str": ["", 'gr\u00fc\u00df "q" \\ \n\0', "a"],
    "ScalarType": [torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn],
    "Layout": [torch.strided, torch.sparse_coo],
    "MemoryFormat": [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d],
    "Device": [torch.device("cpu"), torch.device("meta")],
    "Scalar": [2, 2.5, True, SIZE],
    "Tensor": [ROW],
    "bool?": [None, True],
    "int?": [None, 3],
    "SymInt?": [None, 3, SIZE],
    "float?": [None, 0.5, math.nan],
    "str?": [None, "", "a"],
    "ScalarType?": [None, torch.int8],
    "Layout?": [None, torch.strided],
    "MemoryFormat?": [None, torch.channels_last],
    "Device?": [None, torch.device("cpu"), torch.device("meta")],
    "Scalar?": [None, 2, False, SIZE],
    "Tensor?": [None, ROW],
    "Generator?": [None],
    "bool[]": [[], [True, False]],
    "int[]": [[], [1, 2]],
    "SymInt[]": [[3], [1, SIZE]],
    "float[]": [[], [1, 2.5], [math.inf]],
    "str[]": [[], ["", "\u00fc"]],
    "Tensor[]": [[], [ROW], [ROW, ROW]],
    "Tensor?[]": [[], [None], [ROW], [None, ROW, None]],
    "int[]?": [None, [], [3]],
    "SymInt[]?": [None, [SIZE]],
    "float[]?": [None, [], [0.5]],
    "str[]?": [None, [], ["a"]],
    "Tensor[]?": [None, [], [ROW]],
    "Tensor?[]?": [None, [], [None], [ROW, None]],
}


def operator(kind: str) -> Any:
    return getattr(torch.ops.argument_kinds, "of_" + kind.replace("?", "_or_none").replace("[]", "_list")).default


def register_fakes() -> None:
    like = torch.empty_like
    fakes = {
        "mixed": lambda x, mode, dtype, *args, **kwargs: like(x, dtype=dtype),
        "defaults": lambda x, value=(): like(x),
        "copies": lambda x, more: [like(x) for _ in more],
        "positive": lambda x: [x.new_empty(torch.library.get_ctx().new_dynamic_size())],
        "between": lambda x, ignored: ([like(x), like(x)], like(x), [like(x)]),
    }
    fakes |= {operator(kind).name().partition("::")[2]: lambda x, value: like(x) for kind in VALUES}
    for name, fake in fakes.items():
        torch.library.register_fake(f"argument_kinds::{name}", fake)


def put(value: Any, x: Tensor) -> Any:
    if isinstance(value, list):
        return [put(each, x) for each in value]
    return x.shape[0] if value is SIZE else x[:1] + 1 if value is ROW else value


class Calls(torch.nn.Module):
    """Calls operators with values."""

    def __init__(self, values: dict[str, list[Any]]) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> list[Tensor]:
        return [operator(kind)(x, put(value, x)) for kind, values in self.values.items() for value in values]


class Everything(Calls):
    """Calls them all, with what is left to its default, and takes their results, one of which nobody uses."""

    def forward(self, x: Tensor) -> list[Tensor]:
        ops, answers = torch.ops.argument_kinds, super().forward(x)
        answers += [ops.mixed(x, "a", torch.float64, more) for more in ([], [None, x])]
        answers.append(ops.mixed(x, "b", torch.float32, [], x.device, x, [1.0], [x], size=x.shape[0], flip=True, dim=0))
        answers += [ops.defaults(x), ops.defaults(x, value=[])]
        for more in ([], [1], [1, 2, 3]):
            answers += ops.copies(x, more)
        (found,) = ops.positive(x)
        written = x.clone()
        ops.add_to(written, [])
        for ignored in ([], [1]):
            first, _, last = ops.between(x, ignored)
            answers += [first[0], *last]
        return [*answers, found, written]


def everything() -> ExportSpec:
    register_fakes()
    return ExportSpec(Everything(VALUES), (torch.randn(4, 3),), dynamic_shapes={"x": {0: "rows[2:9]"}})
