"""Runs torch's draft export and reads its report: the one place that knows torch's private report."""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._logging._internal import DTRACE_ENV_VAR
from torch._logging.structured import INTERN_TABLE

from exportkit.export.sizes.shapes import DynamicSizes
from exportkit.export.trace.torch_export import TracingTask, call_export

# torch reports conditions on sizes too. exportkit's own search says more about them.
_OF_OPERATORS = ("MISSING_FAKE_KERNEL", "MISMATCHED_FAKE_KERNEL")
_OF_VALUES = "DATA_DEPENDENT_ERROR"


@dataclass(frozen=True)
class DraftProblem:
    """One problem that torch's draft export passed over: an operator's fake kernel, or a value that Python needs.

    Attributes:
        operator: The operator whose fake kernel is missing or wrong; empty for a value.
        reason: What is wrong with the fake, or the expression that needs the value.
        result: What the expression was for the example inputs; empty for an operator.
        occurrences: How often the value was needed at this line.
        frames: The Python frames, outermost first; empty for an operator.
        variables: The local variables of the innermost frame, as torch describes them.
    """

    operator: str = ""
    reason: str = ""
    result: str = ""
    occurrences: int = 1
    frames: tuple[traceback.FrameSummary, ...] = ()
    variables: Mapping[str, str] | None = None


def draft_export(
    task: TracingTask, sizes: DynamicSizes
) -> tuple[torch.export.ExportedProgram, tuple[DraftProblem, ...]]:
    """Traces a model with real tensors beside the fake ones, which passes over problems and reports them.

    Raises:
        RefusedByTorchError: torch.export refused the model for another reason.
    """
    with _trace_files():
        program, _ = call_export(torch.export.draft_export, task, sizes)
    report: Any = program._report  # type: ignore[attr-defined]  # draft_export adds it
    return program, tuple(
        _of_operator(failure.data) if failure.failure_type.name in _OF_OPERATORS else _of_value(failure.data)
        for failure in report.failures
        if failure.failure_type.name in (*_OF_OPERATORS, _OF_VALUES)
    )


@contextmanager
def _trace_files() -> Iterator[None]:
    """Gives torch a temporary folder for the files that a draft leaves behind."""
    before = os.environ.get(DTRACE_ENV_VAR)
    with tempfile.TemporaryDirectory(prefix="exportkit-draft") as folder:
        os.environ[DTRACE_ENV_VAR] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[DTRACE_ENV_VAR]
            else:
                os.environ[DTRACE_ENV_VAR] = before


def _of_operator(data: Mapping[str, Any]) -> DraftProblem:
    namespace, _, name = str(data["op"]).partition(".")
    return DraftProblem(operator=f"{namespace}::{name.removesuffix('.default')}", reason=data.get("reason", ""))


def _result(expression: str, result: str) -> str:
    """Returns what an expression was. torch 2.11 writes the truth of a relation as a number."""
    relation = re.match(r"(Eq|Ne)\(", expression) or re.search("[<>]", expression)
    return {"0": "False", "1": "True"}.get(result, result) if relation else result


def _of_value(data: Mapping[str, Any]) -> DraftProblem:
    files = {number: name for name, number in INTERN_TABLE.items()}  # the report lacks names that torch wrote before
    frames = tuple(
        traceback.FrameSummary(files.get(frame["filename"], ""), frame["line"], frame["name"], line=frame["loc"])
        for frame in data["user_stack"]
    )
    known = (data.get("frame_locals") or {}).get("locals", {})
    return DraftProblem(
        reason=str(data["expr"]),
        result=_result(str(data["expr"]), str(data["result"])),
        occurrences=data["occurrences"],
        frames=frames,
        variables={name: ", ".join(map(str, values)) for name, values in known.items()},
    )
