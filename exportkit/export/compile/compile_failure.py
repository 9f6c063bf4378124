"""Finds the operator that Inductor failed at, or wrote code for that does not compile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor import exc
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.scheduler import Scheduler

from exportkit.export.models.source_lines import where_listed, where_traced
from exportkit.export.torch_patches.patched import all_patched

_TARGET = re.compile(r"^\s*target: (\S+)$", re.MULTILINE)
_REFUSED = re.compile(r"^(model\.\w+\.cpp):(\d+):\d+: error: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class FailedOperator:
    """An operator, such as `aten.amin.default`, and the line of the model's code, or ""."""

    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name}, {self.where}" if self.where else self.name


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


@contextmanager
def noted_lines() -> Iterator[Mapping[str, torch.fx.Node]]:
    """Yields, while the block runs, the lines of C++ that Inductor writes to call operators, and the node of each."""
    nodes: list[torch.fx.Node] = []
    written: dict[str, torch.fx.Node] = {}

    def for_node(write: Callable[..., None]) -> Callable[..., None]:
        def noted(scheduler: Scheduler, scheduled: Any) -> None:
            nodes[:] = list(scheduled.node.origins)[:1] if scheduled.node else []
            write(scheduler, scheduled)
            nodes.clear()

        return noted

    def for_line(write: Callable[..., None]) -> Callable[..., None]:
        def noted(wrapper: PythonWrapperCodegen, line: Any) -> None:
            if nodes and isinstance(line, str):
                written[line.strip()] = nodes[0]
            write(wrapper, line)

        return noted

    with all_patched(("Scheduler.codegen_extern_call", for_node), ("PythonWrapperCodegen.writeline", for_line)):
        yield written


def wrong_code(said: str, written: Mapping[str, torch.fx.Node], folder: Path) -> tuple[str, str] | None:
    """Returns what is wrong with generated C++, and the operator that it was written for with its line, or "".

    Args:
        said: What the C++ compiler said.
        written: Lines of the code, from `noted_lines`.
        folder: Where the sources are.

    Returns:
        None if the compiler does not complain about a line that torch wrote.
    """
    match = _REFUSED.search(said)
    if match is None:
        return None
    line = (folder / match[1]).read_text().splitlines()[int(match[2]) - 1].strip()
    node = written.get(line)
    at = str(FailedOperator(str(node.target), where_traced(node))) if node else ""
    return f"torch {torch.__version__} wrote C++ code that does not compile: {match[3]}\n    {line}", at
