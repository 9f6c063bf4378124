"""Takes operators that write into arguments as other libraries have them, FlashAttention and FlashMLA for example.

torch makes a pure function of such an operator, which returns what was written, too, and Inductor makes the operator of
it again. Two kinds are left out, though nothing else is missing:

- Operators that return a list of tensors. Their fake kernels say how long it is. If it is empty, Inductor takes what
  was written for what is in it.
- Calls that give no tensor to write into, as of `f(Tensor x, Tensor(a!)? out=None) -> Tensor`. Inductor takes the one
  result for the tuple that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import ir
from torch._library.utils import is_builtin, is_tensorlist_like_type

from exportkit.export.torch_patches.patched import Function, patched


@contextmanager
def writing_operators() -> Iterator[None]:
    """Takes them while the block runs."""
    with (
        patched("auto_functionalize.can_auto_functionalize", _also_lists),
        patched("ir.can_auto_functionalize", _also_lists),  # imported by its name
        patched("FallbackKernel.codegen", _with_empty_lists),
        patched("post_grad.decompose_auto_functionalized", _with_two_results),
    ):
        yield


def _also_lists(decide: Function, op: Any) -> bool:
    return decide(op) or _returns_new_list(op)


def _returns_new_list(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or is_builtin(op) or not op._schema.is_mutable:
        return False
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None and is_tensorlist_like_type(returns[0].type)


def _with_empty_lists(write: Function, kernel: ir.FallbackKernel, wrapper: Any) -> None:
    if not kernel.outputs and _returns_new_list(kernel.op_overload):
        kernel.mutation_outputs = []
    write(kernel, wrapper)


def _with_two_results(decompose: Function, graph: torch.fx.Graph) -> None:
    """Lets a call that would return a tuple of one return None, too: of that, Inductor sees that it is a tuple."""

    def two(call: Function, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = call(*args, **kwargs)
        return results if len(results) != 1 else (*results, None)

    with patched("auto_functionalize.auto_functionalized_v2_dense", two):
        decompose(graph)
