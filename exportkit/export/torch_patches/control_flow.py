"""Lets torch trace loops and branches that eager runs: torch.cond, while_loop, scan, map and associative_scan.

torch hands these to Dynamo, in eager mode too. Dynamo refuses results that share memory with an argument or with each
other, results whose strides differ, and weights that share memory. Here eager mode runs them as torch documents them,
and tracing makes copies where Dynamo refuses. associative_scan is written out with torch's operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from exportkit.export.torch_patches.patched import Function, instead, patched

Combine = Callable[..., Sequence[torch.Tensor]]

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


@contextmanager
def traceable_control_flow() -> Iterator[None]:
    """Lets torch trace more loops and branches while the block runs."""
    with (
        patched("torch.compile", functools.partial(_handed, _traced)),
        patched("associative_scan.generic_associative_scan", instead(associative_scan)),
    ):
        yield


@contextmanager
def eager_control_flow() -> Iterator[None]:
    """Lets eager mode run loops and branches in Python, as torch documents them, while the block runs."""
    with patched("torch.compile", functools.partial(_handed, _run)):
        yield


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


@contextmanager
def weights_apart(model: torch.nn.Module) -> Iterator[bool]:
    """Lets weights that share memory have memory of their own while the block runs. Yields whether there are any."""
    places = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.layout is torch.strided
    ]
    sharing: dict[int, set[int]] = {}
    for _, _, tensor in places:
        sharing.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor))
    moved = [place for place in places if len(sharing[place[2].untyped_storage().data_ptr()]) > 1]
    own: dict[int, torch.Tensor] = {}
    for held, name, tensor in moved:
        copied = tensor.detach().clone()
        as_is = torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied
        held[name] = own.setdefault(id(tensor), as_is)  # type: ignore[assignment]  # a parameter for a parameter
    try:
        yield bool(moved)
    finally:
        for held, name, tensor in moved:
            held[name] = tensor  # type: ignore[assignment]  # what was there before


# --- associative_scan -------------------------------------------------------------------------------------------------


def associative_scan(
    combine: Combine, leaves: Sequence[torch.Tensor], dim: int = 0, additional_inputs: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """Computes the running combination of slices, for slices of any sizes and any number of them.

    torch's own function asks whether there are elements, which fixes every size.

    Args:
        combine: Takes the slices of all leaves on the left, then those on the right, batched along the dimension.
        leaves: The tensors.
        dim: The dimension along which they are combined: always 0.
        additional_inputs: More arguments of `combine`.
    """
    assert dim == 0

    def combined(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return tree_leaves(combine(*left, *right, *additional_inputs))

    if isinstance(leaves[0].shape[0], int):
        return _by_pairs(combined, list(leaves))
    return _by_doubling(combined, list(leaves))


def _by_pairs(combined: Combine, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Combines neighbours, then those: 2 n combinations, in log n steps up and as many down."""
    count = leaves[0].shape[0]
    if count < 2:
        return leaves
    odd = _by_pairs(
        combined, list(combined([leaf[: count - 1 : 2] for leaf in leaves], [leaf[1::2] for leaf in leaves]))
    )
    first = [leaf[:1] for leaf in leaves]
    if count == 2:
        even = first
    else:
        later = combined([leaf[: (count - 1) // 2] for leaf in odd], [leaf[2::2] for leaf in leaves])
        even = [torch.cat(pair) for pair in zip(first, later)]
    return [_interleaved(*pair) for pair in zip(even, odd)]


def _interleaved(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    pairs = odd.shape[0]
    woven = torch.stack([even[:pairs], odd], 1).flatten(0, 1)
    return woven if even.shape[0] == pairs else torch.cat([woven, even[pairs:]])


def _by_doubling(combined: Combine, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Combines each slice with the one 1, 2, 4, ... before it: as many steps as the largest size needs."""
    count = leaves[0].shape[0]
    position = torch.arange(count, device=leaves[0].device)
    for step in range((_largest(count) - 1).bit_length()):
        distance = 1 << step
        before = (position - distance).clamp(min=0)
        joined = combined([leaf.index_select(0, before) for leaf in leaves], leaves)
        reached = position >= distance
        leaves = [torch.where(reached.view(-1, *[1] * (leaf.ndim - 1)), new, leaf) for new, leaf in zip(joined, leaves)]
    return leaves


def _largest(size: Any) -> int:
    """Returns the upper end of a symbolic size; 2**31 if it has none."""
    node = size.node
    upper = node.shape_env.bound_sympy(node.expr).upper
    return int(upper) if upper.is_Integer and upper < 1 << 31 else 1 << 31
