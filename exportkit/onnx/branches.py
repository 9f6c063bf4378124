"""Finds decompositions that branch on a size, the caller's and torch's: their trace is right for some sizes only."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.errors import ExportError
from exportkit.export.models.source_lines import where, where_traced
from exportkit.export.sizes.guards import placed_relation, relation_text
from exportkit.export.torch_patches.patched import DOOR, Function, patched

_TORCH = str(Path(torch.__file__).parent)
_SYMBOLS = torch.__file__  # where torch defines SymInt and SymBool, whose __bool__ and __int__ Python calls
_LARGEST = 2**20  # tried where a size has no upper end

Ranges = Mapping[sympy.Expr, Any]


@contextmanager
def refusing_branches(name: str, ranges: Ranges) -> Iterator[None]:
    """Refuses Python code of an operator's decomposition that needs to know a size while the block traces it.

    Of what torch's own code concludes about sizes, only equalities count, such as the number of rows that a loop over a
    tensor runs for. It also asks, for instance, whether a slice is the whole tensor, and goes on rightly if it is not.
    ExportError: not all sizes in the ranges of the symbols take the same branch.
    """

    def look(log_guard: Function, env: ShapeEnv, prefix: str, guard: object, *rest: Any, **named: Any) -> None:
        frame, asks = _outside(traceback.extract_stack())
        suspect = isinstance(guard, sympy.Basic) and (asks or isinstance(guard, sympy.Eq))
        if suspect and not _always(guard, env, ranges):
            raise ExportError(
                f"the decomposition of {name} is right for some sizes only: {where(frame)} needs to know whether "
                f"{relation_text(guard)} in Python",
                hint="Compute it for every size with torch's operators, such as torch.where, or declare a range in "
                "which the condition always holds.",
            )
        log_guard(env, prefix, guard, *rest, **named)

    with patched("ShapeEnv._log_guard", look):
        yield


@contextmanager
def refusing_decompositions(ranges: Ranges) -> Iterator[None]:
    """Refuses operators that torch decomposes in the block to something that is right for some sizes only.

    torch.onnx lets torch decompose what it does not translate, and forgets what was concluded about sizes: adaptive
    pooling, for instance, is another graph where the size is a multiple. ExportError: it asked whether sizes are equal,
    and not all in the ranges of the symbols give one answer.
    """
    refused: list[ExportError] = []

    def look(log_guard: Function, env: ShapeEnv, prefix: str, guard: object, *rest: Any, **named: Any) -> None:
        # What torch concludes while it remembers a fake tensor, it forgets again ("eval [guard suppressed]").
        asks = isinstance(guard, (sympy.Eq, sympy.Ne)) and "suppressed" not in prefix
        if asks and not _always(guard, env, ranges):
            node = _decomposed()
            # Where an assertion of the model's does not hold, no answer is right.
            if node is None or node.target is not torch.ops.aten._assert_scalar.default:
                refused.append(_right_for_some(node, placed_relation(guard, env)))
                raise RuntimeError
        log_guard(env, prefix, guard, *rest, **named)

    try:
        with patched("ShapeEnv._log_guard", look):
            yield
    except Exception as error:
        if refused:  # torch would have added the node to its message
            raise refused[0] from error
        raise


def _right_for_some(node: torch.fx.Node | None, relation: str) -> ExportError:
    operator, place = ("an operator", "") if node is None else (node.target, where_traced(node))
    return ExportError(
        f"the model cannot become ONNX{' at ' + place if place else ''}: torch's decomposition of {operator} is right "
        f"for some sizes only: it needs {relation}",
        hint="Write that line with other operators of torch, or fix that size.",
    )


def _decomposed() -> torch.fx.Node | None:
    for frame, _ in traceback.walk_stack(None):
        node = frame.f_locals.get("n")
        if frame.f_code.co_name == "run_node" and isinstance(node, torch.fx.Node):
            return node
    return None


def _outside(stack: traceback.StackSummary) -> tuple[traceback.FrameSummary, bool]:
    """Returns the innermost line outside of torch, and whether it asks a size for a Python number or truth itself."""
    inner = next(i for i, frame in reversed(list(enumerate(stack))) if not _of_torch(frame.filename))
    asks = inner + 1 < len(stack) and stack[inner + 1].filename == _SYMBOLS
    return stack[inner], asks


def _of_torch(file: str) -> bool:
    return file.startswith(_TORCH) or file in (__file__, DOOR)


def _always(guard: sympy.Basic, env: ShapeEnv, ranges: Ranges) -> bool:
    """Returns whether a condition holds at the ends of the sizes' ranges, beside them and between them."""
    symbols = sorted(guard.free_symbols, key=str)
    values = [_values(ranges.get(symbol, env.var_to_range.get(symbol))) for symbol in symbols]
    try:
        return all(guard.xreplace(dict(zip(symbols, point))) == sympy.true for point in itertools.product(*values))
    except ZeroDivisionError:
        return False  # a remainder whose divisor is 0 for some sizes, where another branch is taken


def _values(interval: Any) -> list[sympy.Integer]:
    low = max(0, int(interval.lower)) if interval is not None and interval.lower.is_Integer else 0
    high = int(interval.upper) if interval is not None and interval.upper.is_Integer else _LARGEST
    numbers = {low, low + 1, low + 2, (low + high) // 2, high - 1, high}
    return [sympy.Integer(number) for number in sorted(numbers) if low <= number <= high]
