"""Explains torch.export's errors in terms of the command line: which input, which line, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import sympy
from sympy.logic.boolalg import BooleanFunction
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from exportkit.errors import ExportError
from exportkit.export.guards import with_places
from exportkit.export.shapes import DynamicSizes
from exportkit.export.size_changes import SizeChange, changes_between, violated_names
from exportkit.export.source_lines import where_raised
from exportkit.export.torch_export import RefusedByTorchError, TracingTask, sizes_that_trace

_TRIES = 2  # a tie that nobody named is a guess, and what torch says itself comes after it


def explain_refusal(refused: RefusedByTorchError, task: TracingTask, *, strict: bool = False) -> ExportError:
    """Returns the error to raise instead of an error from torch.export.

    Sizes are advised only if torch.export took the model with them: it is called again, at most twice.

    Args:
        refused: The refusal.
        task: What was refused.
        strict: Advises only sizes for which no condition fails by which an operator chose a layout.
    """
    if violated_names(str(refused)):
        found = sizes_that_trace(task, refused, _TRIES, strict=strict)
        changes = changes_between(refused.sizes, found[0], task.examples) if found else ()
        return sizes_error(refused, changes)
    return _explained(refused.error)


def sizes_error(refused: RefusedByTorchError, changes: Sequence[SizeChange]) -> ExportError:
    """Explains that the model does not take every size that the caller declared.

    Args:
        refused: The refusal.
        changes: The sizes with which torch.export takes the model; empty if none were found.
    """
    text = str(refused)
    names = violated_names(text)
    places = _places(refused.sizes, names)
    lines = refused.log.lines(place for name in names for place in places[name])
    reasons = lines or [with_places(line) for line in re.findall(r"^  - (.*)$", text, re.MULTILINE)]
    about = ", ".join(f"`{name}` ({', '.join(places[name])})" for name in names if places[name]) or "a size"
    message = f"the model does not take every size that {about} was declared to have:" + "".join(
        f"\n    {reason}" for reason in dict.fromkeys(reasons)
    )
    if not changes:
        return ExportError(
            message,
            hint="Change that line, declare a range in which the condition holds, or give example inputs of other "
            "sizes. No sizes that exportkit tried work.",
        )
    return ExportError(message, hint=f"Write {advice(changes)}. The model traces with it.")


def advice(changes: Sequence[SizeChange]) -> str:
    """Returns the changes as options, with what they mean."""
    options = " ".join(change.option for change in changes)
    return f"{options} ({'; '.join(dict.fromkeys(change.meaning for change in changes))})"


def _explained(error: Exception) -> ExportError:
    text = str(error)
    place = where_raised(error)
    at = f" at {place}" if place else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        return _depends_on_values(error, at)
    for pattern, meaning, hint in _KNOWN:
        if re.search(pattern, text):
            return ExportError(f"{meaning}{at}: {_first_line(text)}", hint=hint)
    return ExportError(f"torch.export refused the model{at}: {type(error).__name__}: {_essence(text)}")


BRANCHES = (
    "the model branches on the value of a tensor",
    "Compute both ways and choose with torch.where(condition, a, b), or write torch.cond(condition, f, g, (x,)). If "
    "the condition always holds, remove the branch or state it with torch._check(condition).",
)
NEEDS_NUMBER = (
    "the model needs a number from a tensor as Python's own number",
    "Leave int(), float() or range() out there: .item() gives a number that torch.export follows. State its range with "
    "torch._check(n >= 1) and torch._check(n <= 64), and take a part of a tensor with torch.narrow.",
)


def _depends_on_values(error: GuardOnDataDependentSymNode, at: str) -> ExportError:
    """Explains that Python needs a value that only a call's tensors give."""
    what, hint = BRANCHES if isinstance(error.cond, (sympy.Rel, BooleanFunction)) else NEEDS_NUMBER
    return ExportError(f"{what}{at}, which is unknown when the model is compiled", hint=hint)


_KNOWN = (
    (
        r"\.numpy\(\) is not supported|numpy",
        "the model calls NumPy",
        "Write that part with torch's operators, or as a custom operator in C++ (TORCH_LIBRARY).",
    ),
    (
        r"Cannot access data pointer|doesn't have storage|data_ptr|incompatible function arguments",
        "the model passes a tensor to code that is not a PyTorch operator",
        "Register that code as an operator (TORCH_LIBRARY in C++, and a fake kernel): torch.export cannot see into it.",
    ),
    (
        r"__obj_flatten__|PackedParams",
        "the model contains a packed object of torch.ao's quantization, which torch.export cannot see into",
        "Quantize with torchao (quantize_), or export the model before it is quantized.",
    ),
    (
        r"torch\.jit|ScriptModule|ScriptObject",
        "the model contains TorchScript",
        "Export the original nn.Module. torch.export does not accept TorchScript.",
    ),
)


def _places(sizes: DynamicSizes, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the places of each name: {"gh": ["image:2"]}."""
    return {
        name: [f"{t}:{d}" for t, dims in sizes.places.items() for d, size in dims.items() if size.dimension == name]
        for name in names
    }


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _essence(text: str) -> str:
    """Returns the message without torch's advice about its other tools."""
    text = text.partition("The error above occurred when calling torch.export.export")[0]
    kept = [line for line in text.splitlines() if line.strip() and not re.search("TORCH_LOGS|TORCHDYNAMO|http", line)]
    return "\n    ".join(kept[:20]) or "no message"
