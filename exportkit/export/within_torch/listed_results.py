"""Takes operators that write into arguments and return a list of tensors, such as FlashAttention's.

torch makes a pure function of an operator that writes only if each result is one tensor. What it does then works for
lists, too: the fake kernel says how long they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops import auto_functionalize
from torch._inductor import ir
from torch._library.utils import is_builtin, is_tensorlist_like_type

from exportkit.export.within_torch.torch_internals import replaced


@contextmanager
def listed_results() -> Iterator[None]:
    """Takes such operators while the block runs.

    Raises:
        ExportError: This torch lacks a function that is changed.
    """
    # Inductor has imported the function by its name.
    with (
        replaced(auto_functionalize, "can_auto_functionalize", _also_lists),
        replaced(ir, "can_auto_functionalize", _also_lists),
    ):
        yield


def _also_lists(decide: Callable[..., bool]) -> Callable[..., bool]:
    def decided(op: Any) -> bool:
        return decide(op) or returns_new_lists(op)

    return decided


def returns_new_lists(op: Any) -> bool:
    """Returns whether an operator writes into tensors, and returns one list of new ones."""
    if not isinstance(op, torch._ops.OpOverload) or is_builtin(op) or not op._schema.is_mutable:
        return False
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None and is_tensorlist_like_type(returns[0].type)
