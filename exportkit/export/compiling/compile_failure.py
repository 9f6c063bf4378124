"""Finds the operator that Inductor failed at."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch._inductor import exc

from exportkit.export.models.source_lines import where_listed

_TARGET = re.compile(r"^\s*target: (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class FailedOperator:
    """An operator, such as `aten.amin.default`, and the line of the model's code, or ""."""

    name: str
    where: str


def failed_operator(error: BaseException | None) -> FailedOperator | None:
    """Returns the operator whose lowering raised; None if the compiler failed later, or does not say where.

    Args:
        error: What compiling raised. Its causes are looked at, too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None)
        for each in (inner, error):
            if isinstance(each, exc.LoweringException) and (found := _TARGET.search(str(each))):
                return FailedOperator(found[1], where_listed(str(each)))
        error = inner or error.__cause__ or error.__context__
    return None
