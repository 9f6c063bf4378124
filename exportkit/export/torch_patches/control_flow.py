"""Lets torch trace loops and branches that eager runs: torch.cond, while_loop, scan, map and associative_scan.

torch hands these to Dynamo, in eager mode too. Dynamo refuses results that share memory with an argument or with each
other, and results whose strides differ. Here eager mode runs them as torch documents them, and tracing makes copies
where Dynamo refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from exportkit.export.torch_patches.patched import Function, patched

_PACKAGE = "torch._higher_order_ops."
# Where each operator's arguments have the tensors that its results must be like.
_CARRIED = {"while_loop": 2, "scan": 1}


class ControlFlowError(Exception):
    """torch could not trace a loop or a branch.

    Attributes:
        operator: torch's name of it, such as while_loop.
        error: torch's error.
    """

    def __init__(self, operator: str, error: Exception) -> None:
        super().__init__(str(error))
        self.operator, self.error = operator, error


def traceable_control_flow() -> AbstractContextManager[None]:
    """Lets torch trace more loops and branches while the block runs."""
    return patched("torch.compile", functools.partial(_handed, _traced))


def eager_control_flow() -> AbstractContextManager[None]:
    """Lets eager mode run loops and branches in Python, as torch documents them, while the block runs."""
    return patched("torch.compile", functools.partial(_handed, _run))


Handler = Callable[[str, Function, Function, Sequence[Any]], Any]


def _handed(handler: Handler, compile_: Function, model: Any = None, *args: Any, **options: Any) -> Any:
    """Hands torch's own loops and branches to a handler, in place of torch.compile.

    The handler gets the name of the operator, the function that calls it, what compiles that, and the arguments.
    """
    where = str(getattr(model, "__module__", ""))
    if not where.startswith(_PACKAGE):
        return compile_(model, *args, **options)
    operator = where.removeprefix(_PACKAGE)
    compiling = functools.partial(compile_, model, *args, **options)
    return lambda *arguments: handler(operator, model, compiling, arguments)


# --- eager mode -------------------------------------------------------------------------------------------------------


def _run(operator: str, function: Function, _: object, arguments: Sequence[Any]) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is None and operator in _LOOPS:
        return _LOOPS[operator](*arguments)
    return function(*arguments)


def _cond(condition: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return true(*operands) if condition else false(*operands)


def _while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], others: Sequence[Any]
) -> Any:
    values: Any = carried
    while condition(*tree_leaves(values), *others):
        values = body(*tree_leaves(values), *others)
        if not isinstance(values, (tuple, list)) or len(tree_leaves(values)) != len(carried):
            raise TypeError(f"the body of while_loop must return a tuple of {len(carried)}, as it gets")
    return values


def _scan(combine: Callable[..., Any], carry: Any, slices: Sequence[torch.Tensor]) -> Any:
    answers = []
    for place in range(slices[0].shape[0]):
        carry, answer = combine(*tree_leaves(carry), *(each[place] for each in slices))
        answers.append(answer)
    return carry, tree_map(lambda *each: torch.stack(each), *answers)


_LOOPS: Mapping[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}


# --- tracing ----------------------------------------------------------------------------------------------------------


def _traced(operator: str, function: Function, compiling: Function, arguments: Sequence[Any]) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return function(*arguments)  # Dynamo sees no vmap around it, and the operator's own rule does
    if operator == "while_loop" and (numbers := [v for v in tree_leaves(arguments[2]) if type(v) in (int, float)]):
        # Dynamo traces it, but torch neither writes the program to a file nor compiles it.
        raise ControlFlowError(operator, TypeError(f"it carries the number {numbers[0]}, which is no tensor"))
    try:
        return compiling()(*arguments)
    except Exception:  # Dynamo's own, or what a body raises
        torch._dynamo.reset()  # it may remember another model's trace
    try:
        return compiling()(*arguments)
    except Exception as error:
        first = error
    try:
        return compiling()(*_apart(operator, arguments))
    except Exception:  # the first error is told: this one may come of the copies
        raise ControlFlowError(operator, first).with_traceback(first.__traceback__) from first


def _apart(operator: str, arguments: Sequence[Any]) -> list[Any]:
    """Returns the arguments of an operator with bodies that return copies."""
    changed = [_copying(argument) if callable(argument) else argument for argument in arguments]
    if (place := _CARRIED.get(operator)) is not None:
        changed[place] = tree_map_only(torch.Tensor, _copy, changed[place])
    return changed


def _copying(body: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(body, functools.partial):  # Dynamo insists on one for scan
        return functools.partial(_copying(body.func), *body.args, **body.keywords)

    def copying(*arguments: Any, **named: Any) -> Any:
        return tree_map_only(torch.Tensor, _copy, body(*arguments, **named))

    return copying


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
