"""Finds the nodes that Inductor failed at, or wrote code for that does not compile."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

from exportkit.errors import ExportError
from exportkit.export.models.source_lines import where_traced
from exportkit.export.torch_patches.patched import Function, all_patched
from exportkit.package.compiled_with import leave_one

_REFUSED = re.compile(r"^(model\.\w+\.cpp):(\d+):\d+: error: (.+)$", re.MULTILINE)


def described(node: torch.fx.Node) -> str:
    """Returns an operator and the line of the model's code that it comes from, if that is known."""
    where = where_traced(node)
    return f"{node.target}, {where}" if where else str(node.target)


class UncompiledError(Exception):
    """The program was not compiled, and why. If nothing helps, `refusal` is said; `places` may be left to eager."""

    def __init__(self, said: str, refusal: ExportError, at: str, places: Iterable[str]) -> None:
        self.refusal, self.at, self.places = refusal, at, tuple(places)
        super().__init__(said)

    def left_to_eager(self, left: Sequence[str]) -> tuple[str, ...]:
        """Returns what is left to eager then.

        Raises:
            ExportError: Nothing more can be.
        """
        more = reduce(leave_one, self.places, tuple(left))
        if more == tuple(left):
            raise self.refusal from self.__cause__
        return more


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields what was raised, and what that was raised for."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__


def failed_nodes(error: BaseException) -> list[torch.fx.Node]:
    """Returns the nodes that torch was at when it raised: the innermost of its stack, several of a fused kernel."""
    for each in with_causes(error):
        for frame, _ in reversed([*traceback.walk_tb(each.__traceback__)]):
            for value in frame.f_locals.values():
                if found := _nodes(value):
                    return found
    return []


def _nodes(value: object) -> list[torch.fx.Node]:
    if isinstance(value, BaseSchedulerNode):
        value = [origin for part in value.get_nodes() if part.node for origin in part.node.get_origins()]
    nodes = value if isinstance(value, list) else [value]
    return [node for node in nodes if isinstance(node, torch.fx.Node) and node.op == "call_function"]


@contextmanager
def noted_lines() -> Iterator[Mapping[str, torch.fx.Node]]:
    """Yields, while the block runs, the lines of C++ that Inductor writes to call operators, and the node of each."""
    nodes: list[torch.fx.Node] = []
    written: dict[str, torch.fx.Node] = {}

    def for_node(write: Function, scheduler: Scheduler, scheduled: Any) -> None:
        nodes[:] = list(scheduled.node.origins)[:1] if scheduled.node else []
        write(scheduler, scheduled)
        nodes.clear()

    def for_line(write: Function, wrapper: PythonWrapperCodegen, line: Any) -> None:
        if nodes and isinstance(line, str):
            written[line.strip()] = nodes[0]
        write(wrapper, line)

    with all_patched(("Scheduler.codegen_extern_call", for_node), ("PythonWrapperCodegen.writeline", for_line)):
        yield written


def wrong_code(said: str, written: Mapping[str, torch.fx.Node], folder: Path) -> tuple[str, list[torch.fx.Node]] | None:
    """Returns what the C++ compiler refuses, and the nodes of that line; None if torch wrote no such line."""
    match = _REFUSED.search(said)
    if match is None:
        return None
    line = (folder / match[1]).read_text().splitlines()[int(match[2]) - 1].strip()
    nodes = [written[line]] if line in written else []
    return f"torch {torch.__version__} wrote C++ code that does not compile: {match[3]}\n    {line}", nodes
