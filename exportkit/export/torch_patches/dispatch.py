"""Watches the operators of a call, those inside torch.cond and its kind included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only


class UncompiledMode(TorchDispatchMode):
    """A mode that does not import torch's compiler.

    torch keeps its compiler away from a mode, and imports it for that, which takes a second. Where nothing else has
    imported it, nothing is compiled.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        guarded: Any = cls.__torch_dispatch__
        plain: Any = getattr(guarded, "__wrapped__", None)
        frames = torch._C._dynamo.eval_frame

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return all_tensors((guarded if "torch._dynamo" in sys.modules else plain)(*args, **kwargs))

        if plain is not None and hasattr(frames, "set_code_exec_strategy"):
            # Once the compiler is there, it must not look at this function either.
            skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
            frames.set_code_exec_strategy(dispatch.__code__, skipped)
            cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class OperatorMode(TorchDispatchMode):
    """Calls `operator` for every operator, below autograd and composite operators."""

    supports_higher_order_operators = True

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and returns its answer. A subclass does more."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gives operators to `operator`, and watches the branches and bodies of the others."""
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a jagged tensor, for one, calls operators on the tensors that it has
        if isinstance(func, HigherOrderOperator):
            return func(*map(self._watched, args), **(kwargs or {}))
        return all_tensors(self.operator(func, args, kwargs or {}))

    def _watched(self, argument: Any) -> Any:
        """Returns a branch or a loop's body that this mode sees too: torch takes the mode off around the operator."""
        if not callable(argument):
            return argument

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return watched


def by_name(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a call gives an operator, by their names in its schema."""
    return {**dict(zip((each.name for each in operator._schema.arguments), args)), **kwargs}


def written_leaves(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns what a call gives an operator to write into, as its schema says."""
    given = by_name(operator, args, kwargs)
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tree_leaves([given.get(name) for name in written])


UNDEFINED = torch.empty(0)
"""Stands for a tensor of a Tensor[] that a kernel left undefined: Python has None for it, which no mode may return."""


def all_tensors(result: Any) -> Any:
    """Returns a result of an operator as a mode may return it."""
    return [UNDEFINED if each is None else each for each in result] if type(result) is list else result


def mapped(kind: type, change: Callable[[Any], Any], arguments: Any) -> Any:
    """Returns an operator's arguments or results with those of a kind changed, faster than torch's tree_map."""
    if isinstance(arguments, kind):
        return change(arguments)
    if type(arguments) in (tuple, list):
        return type(arguments)([mapped(kind, change, each) for each in arguments])
    if type(arguments) is dict:
        return {name: mapped(kind, change, each) for name, each in arguments.items()}
    return tree_map_only(kind, change, arguments) if isinstance(arguments, (tuple, list, dict)) else arguments


M = TypeVar("M", bound=OperatorMode)


@contextmanager
def watched_by(mode: M) -> Iterator[M]:
    """Lets a mode watch what runs in this context.

    torch.cond and its kind compile themselves in eager mode. Dynamo would see the mode, and would remember for
    torch.export that it gave up. Therefore nothing is compiled meanwhile.
    """
    with torch.compiler.set_stance("force_eager"), mode:
        yield mode
