"""Stops Inductor where it takes sizes that were declared to vary for those of the example."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from exportkit.errors import ExportError
from exportkit.export.compile.compile_failure import with_causes
from exportkit.export.sizes.guards import judged_conditions, placed_relation
from exportkit.export.sizes.tried_sizes import Ranges, counterexamples, holds
from exportkit.export.torch_patches.patched import DOOR, Function, all_patched

_ASKING = ("/symbolic_shapes.py", "/sym_node.py", "/recording.py", "/torch/__init__.py", "/_inductor/sizevars.py", DOOR)

# What sorts strides, and what flattens and splits dimensions for a view. Where these find that two sizes or strides
# differ, they go a way that is right for equal ones, too.
_LAYING_OUT = ("K.__lt__", "_reshape_view_helper", "_reshape_view_helper_core_alg", "compare_sizes")

# Where a product over one element is multiplied out in place of calling a kernel. Both are right for all sizes.
_PRODUCTS = ("mm", "addmm")


class AssumedSizeError(BaseException):
    """Code would be right for some of the declared sizes alone. No `except Exception` of torch's catches it."""

    def __init__(self, condition: str) -> None:
        super().__init__(f"its code would be right only where {condition}")

    def refusal(self, at: str) -> ExportError:
        """Returns what is said where eager's kernels do not help."""
        return ExportError(
            f"torch's compiler fixes a size that was declared to vary{f' at {at}' if at else ''}: {self}",
            hint="Narrow the range with --dynamic, or write that line otherwise. `--format program` works for all.",
        )


@contextmanager
def no_assumed_sizes(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Raises AssumedSizeError where a condition on declared sizes that they do not all fulfil is noted.

    Torch takes such a condition for granted from then on, and compiled code checks none. Two kinds are forgiven: those
    that choose a layout, and those that fail only where a condition fails that eager has judged, for which there are
    cases. Torch concludes nothing from them, and each place that asks is judged by itself. A condition on sizes that
    depend on data cannot be noted, and raises, too.
    """
    judged = judged_conditions(program)
    forgiven: set[sympy.Basic] = set()
    ranges: Ranges = {
        symbol: (max(int(range_.lower), 2), int(range_.upper))
        for symbol, range_ in program.range_constraints.items()
        if isinstance(range_.lower, sympy.Integer) and isinstance(range_.upper, sympy.Integer) and range_.upper >= 2
    }

    def look(log_guard: Function, env: ShapeEnv, prefix: str, guard: Any, *rest: Any, **named: Any) -> None:
        symbols: set[sympy.Symbol] = getattr(guard, "free_symbols", set())
        declared = prefix == "eval" and symbols and symbols <= ranges.keys()  # else checked where code runs
        elsewhere = declared and _is_right_elsewhere(guard)
        if elsewhere or (declared and not _is_not_one(guard) and counterexamples(guard, ranges)):
            if not elsewhere and not any(holds(sympy.Or(guard, sympy.Not(each)), ranges) for each in judged):
                raise AssumedSizeError(placed_relation(guard, env))
            forgiven.update((guard, env.simplify(guard)))
        log_guard(env, prefix, guard, *rest, **named)

    def conclude_unless_forgiven(conclude: Function, env: ShapeEnv, guard: Any) -> None:
        if guard not in forgiven:
            conclude(env, guard)

    def implied_unless_forgiven(implied: Function, env: ShapeEnv, guard: Any) -> Any:
        return () if guard in forgiven else implied(env, guard)

    with all_patched(
        ("ShapeEnv._log_guard", look),
        ("ShapeEnv._maybe_guard_rel", conclude_unless_forgiven),
        ("ShapeEnv.get_implications", implied_unless_forgiven),
    ):
        try:
            yield
        except Exception as error:
            for cause in with_causes(error):
                if isinstance(cause, GuardOnDataDependentSymNode):
                    raise AssumedSizeError(str(cause.cond)) from error
            raise


def _is_not_one(condition: sympy.Basic) -> bool:
    """Returns whether a condition says that a size is not 1."""
    if isinstance(condition, (sympy.Lt, sympy.Le)):
        condition = condition.reversed
    least = 2 if isinstance(condition, sympy.Ge) else 1
    return isinstance(condition, (sympy.Gt, sympy.Ge, sympy.Ne)) and condition.rhs == least


def _is_right_elsewhere(condition: sympy.Basic) -> bool:
    """Returns whether code is right where a condition fails, too, by who asks.

    So it is if what describes an operator's result asks, and if torch goes on as for sizes of which nothing is known:
    `guard_or_false` and `guard_or_true` have a way that is right for all.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_ASKING):
        if frame.f_code.co_name == "_evaluate_expr":
            unknown, found = (frame.f_locals[name] for name in ("fallback_value", "concrete_val"))
            if unknown is not None and unknown == bool(found):
                return True
        frame = frame.f_back
    if frame is None:
        return False
    if frame.f_code.co_filename.endswith("/_subclasses/fake_impls.py"):
        return True
    asks = frame.f_code.co_qualname
    if frame.f_code.co_filename.endswith("/_inductor/decomposition.py") and asks in _PRODUCTS:
        return True
    return asks.endswith(_LAYING_OUT) and isinstance(condition, (sympy.Ne, sympy.Lt, sympy.Gt))
