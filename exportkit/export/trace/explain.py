"""Explains torch.export's errors in terms of the command line: which input, which line, what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import sympy
import torch
from sympy.logic.boolalg import BooleanFunction
from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from exportkit.errors import CompilationError, ExportError, OperatorNotExportableError
from exportkit.export.models.source_lines import where_raised
from exportkit.export.sizes.guards import with_places
from exportkit.export.sizes.size_changes import SizeChange
from exportkit.export.torch_patches.control_flow import ControlFlowError
from exportkit.export.torch_patches.operator_bodies import BodyError
from exportkit.export.trace.hop_subgraphs import flow_nodes
from exportkit.export.trace.preflight import IN_CPP, OTHER_DTYPES, SAME_DTYPE
from exportkit.export.trace.size_search import changes_that_trace
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask

_TRIES = 2  # a tie that nobody named is a guess, and what torch says itself comes after it
_SHOWN = 2  # answers at sizes that were tried


def explain_refusal(refused: RefusedByTorchError, task: TracingTask) -> ExportError:
    """Returns the error to raise instead of an error from torch.export.

    Sizes are advised only if the model could be traced with them, which is tried at most twice.
    """
    return explained_with_changes(refused, task, _TRIES)[0]


def explained_with_changes(
    refused: RefusedByTorchError, task: TracingTask, tries: int
) -> tuple[ExportError, tuple[SizeChange, ...]]:
    """Returns the error, and where sizes are the reason, those with which torch.export takes the model."""
    if not refused.names:
        return _explained(refused.error, task.spec.model), ()
    changes = changes_that_trace(task, refused, tries)
    places = {
        name: [f"{tensor}:{dim}" for (tensor, dim), size in refused.sizes.by_axis.items() if size.dimension == name]
        for name in refused.names
    }
    lines = refused.log.lines(place for name in refused.names for place in places[name])
    reasons = lines or [with_places(line) for line in re.findall(r"^  - (.*)$", str(refused), re.MULTILINE)]
    about = ", ".join(f"`{name}` ({', '.join(of)})" for name, of in places.items() if of) or "a size"
    message = f"the model does not take every size that {about} was declared to have:" + "".join(
        f"\n    {reason}" for reason in dict.fromkeys((*reasons, *refused.tried[:_SHOWN]))
    )
    hint = (
        "Change that line (n // 2 for int(n / 2), x.shape[0] for len(x), no Python loop over rows), declare a range in "
        "which the condition holds, or give example inputs of other sizes. No sizes that exportkit tried work."
    )
    if changes:
        hint = f"Write {advice(changes)}. The model traces with it."
        if any(change.after.isdecimal() for change in changes):
            hint += " To let it vary, change that line or fake kernel: int(n), len(x) and loops over x fix it."
    return ExportError(message, hint=hint), changes


def advice(changes: Sequence[SizeChange]) -> str:
    """Returns the changes as options, with what they mean."""
    options = " ".join(change.option for change in changes)
    return f"{options} ({'; '.join(dict.fromkeys(change.meaning for change in changes))})"


def _explained(error: Exception, model: torch.nn.Module) -> ExportError:
    if isinstance(error, BodyError):
        inside = _explained(error.error, model)
        called = where_raised(error).partition(": `")[0]
        return OperatorNotExportableError(
            f"operator {error.operator}{f' (called at {called})' if called else ''} is implemented in Python, hosts do "
            f"not have its source, and its body cannot be traced in its place: {inside.message}",
            hint=f"{inside.hint or 'Write its body with operators of torch.'} {IN_CPP}",
        )
    text = str(error)
    place = where_raised(error)
    at = f" at {place}" if place else ""
    if isinstance(error, ControlFlowError) and isinstance(error.error, GuardOnDataDependentSymNode):
        error = error.error
    if isinstance(error, GuardOnDataDependentSymNode):
        refused = _depends_on_values(error, place)
        if any(type(module).__module__.startswith("torchvision.models.detection.") for module in model.modules()):
            return ExportError(
                refused.message, hint="Choose boxes in tensors, as for detectors in own-models.md of the documentation."
            )
        return refused
    if isinstance(error, ControlFlowError):
        loop = error.operator.removesuffix("_impl").replace("cond", "torch.cond")
        return ExportError(f"{loop} cannot be traced{at}: {_reason(error.error)}", hint=_FLOW)
    if any("/torch/nested/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return ExportError(f"torch.export cannot trace nested tensors, and the model makes one{at}", hint=_NESTED)
    operator = str(error.func) if isinstance(error, (DynamicOutputShapeException, UnsupportedOperatorException)) else ""
    if re.search("sparse", operator or f"{_first_line(text)} {place}", re.IGNORECASE):
        return ExportError(f"torch.export cannot trace this use of sparse tensors{at}", hint=_SPARSE)
    if operator:
        return ExportError(f"torch.export does not know the shape of what {operator} returns{at}", hint=_WITHOUT_SHAPE)
    if re.search(OTHER_DTYPES, text):
        return ExportError(f"the model computes with tensors of two dtypes{at}: {_first_line(text)}", hint=SAME_DTYPE)
    for pattern, meaning, hint in _KNOWN:
        if re.search(pattern, text):
            return ExportError(f"{meaning}{at}: {_first_line(text)}", hint=hint)
    scripted = [name or "all of it" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        names = [name for name in scripted if not any(name.startswith(f"{outer}.") for outer in scripted)]
        return ExportError(f"the model contains TorchScript{at}: {', '.join(names)}", hint=_UNSCRIPTED)
    return ExportError(f"torch.export refused the model{at}: {raised_text(error)}")


_WITHOUT_SHAPE = (
    "Write that part with other operators of torch, or as an operator of your own with a fake kernel "
    "(torch.library.register_fake)."
)
_SPARSE = (
    "Keep its indices and its values, and write the product with index_add: "
    "y.new_zeros(m, y.shape[1]).index_add(0, rows, values[:, None] * y[columns]) for a matrix [m, n] by y [n, k]."
)
_UNSCRIPTED = "Export the original nn.Module, and call the original function. torch.export does not accept TorchScript."
_NESTED = (
    "Take rows of one length and a mask instead: rows = values[(offsets[:-1, None] + "
    "torch.arange(longest)).clamp(max=len(values) - 1)], and attn_mask=torch.arange(longest) < "
    "offsets.diff()[:, None]; rows[mask] has the values again."
)
_FLOW = (
    "Let branches and bodies return tensors (torch.tensor(0) for a number) of the sizes, rank, dtype and device that "
    "they get, and write out of place; inside, write w.transpose(0, 1), not w.T. Or compute both branches and choose "
    "with torch.where(condition, a, b), or all rows at once with torch.vmap(f)(rows)."
)
# A line that branches, and one that makes a size of a number, or takes a part of a tensor.
_CHOOSES = r"\b(if|elif|while|assert|and|or|not)\b|^for\b|[<>]|[=!]=|\b(max|min|sorted|bool|any|all)\("
_SIZED = (
    r"\b(reshape|view|expand|narrow|split\w*|chunk|zeros|ones|empty|full|new_\w+|arange|repeat\w*|unflatten|pad\w*)\("
    r"|\[[^\]]*:"
)
_OF_VALUE = (
    "Take the number with h = sizes.tolist() or .item(), and say what it can be: torch._check(h >= 0) and "
    "torch._check(h <= x.shape[0]). Take the part with torch.narrow(x, 0, 0, h), and write -1 in reshape for the size "
    "that depends on values, no other. Or compute at the greatest size, and mask what lies beyond."
)
_BRANCH = (
    "Compute both ways and choose with torch.where(condition, a, b), or write torch.cond(condition, f, g, (x,)). If "
    "the condition always holds, remove the branch or state it: torch._check(condition), and of a tensor "
    "torch._check(condition.item())."
)
_NUMBER = (
    "Leave int(), float() or range() out there: .item() gives a number that torch.export follows. State its range with "
    "torch._check(n >= 1) and torch._check(n <= 64), and take a part of a tensor with torch.narrow. Loop as often as "
    "it may be: h = torch.where(t < n, step(h), h). Choose a layer with torch.stack([f(x) for f in layers])"
    ".index_select(0, n.view(1))[0]."
)


def needs_value(place: str, *, is_truth: bool) -> tuple[str, str]:
    """Returns what a line does that needs a value which only a call's tensors give, and what to write instead."""
    code = found[1] if (found := re.search("`(.*)`", place)) else ""
    if not is_truth:
        return "the model needs a number from a tensor as Python's own number", _NUMBER
    if re.search(_SIZED, code) and not re.search(_CHOOSES, code):
        return "the model makes a size of the value of a tensor", _OF_VALUE
    return "the model branches on the value of a tensor", _BRANCH


def _depends_on_values(error: GuardOnDataDependentSymNode, place: str) -> ExportError:
    """Explains that Python needs a value that only a call's tensors give."""
    is_truth = isinstance(error.cond, (sympy.Rel, BooleanFunction))
    if is_truth and "Size-like symbols: u" in str(error) and not re.search(r"\b(if|elif|while|for|assert)\b", place):
        return ExportError(
            f"torch asks whether {error.cond} at {place}, of a size that depends on data",
            hint="Say in the model what the size is, such as torch._check(x.shape[0] > 0). Eager checks that, too, and "
            "the package refuses what eager refuses.",
        )
    what, hint = needs_value(place, is_truth=is_truth)
    at = f" at {place}" if place else ""
    return ExportError(f"{what}{at}, which is unknown when the model is compiled", hint=hint)


_KNOWN = (
    (
        "__obj_flatten__|PackedParams",
        "the model contains a packed object of torch.ao's quantization",
        "Quantize with torchao (quantize_), or export the model before it is quantized.",
    ),
    (
        r"\.numpy\(\) is not supported|numpy",
        "the model calls NumPy",
        "Write that part with torch's operators, or as a custom operator in C++ (TORCH_LIBRARY).",
    ),
    (
        r"Cannot access data pointer|doesn't have storage|data_ptr|incompatible function arguments",
        "the model passes a tensor to code that is not a PyTorch operator",
        "Register that code as an operator (TORCH_LIBRARY in C++, and a fake kernel; torch.library.triton_op for a "
        "Triton kernel): torch.export cannot see into it.",
    ),
    (
        r"torch\.jit|ScriptModule|ScriptObject|TorchScript",
        "the model contains TorchScript",
        _UNSCRIPTED,
    ),
)


def refused_by_compiler(said: str, program: torch.export.ExportedProgram, at: str) -> CompilationError:
    """Explains that AOTInductor did not compile a program, with the lines that it may be about."""
    message = f"AOTInductor could not compile the program{f' at {at}' if at else ''}: {said}"
    if "CUDA error" in message:
        message += "\n    this process can use the GPU no more"
    works = "Tracing succeeded, so `--format program` works."
    loops = flow_nodes(program.graph_module)
    if not loops:
        return CompilationError(message, hint=f"{works} --repair looks for options that avoid what fails.")
    message += "".join(f"\n    it has {name} at {where}" for name, where in loops)
    return CompilationError(
        message,
        hint=f"{works} torch {torch.__version__} compiles few kinds of loops and branches: write torch.vmap(f)(rows) "
        "for map, a Python loop over a fixed length or associative_scan for scan, a fixed number of steps for "
        "while_loop, torch.where for cond.",
    )


def _reason(error: Exception) -> str:
    """Returns what torch says is wrong in one sentence: Dynamo's explanation, or an error within it, or the error."""
    text = str(error)
    inner = re.search(r"got (\w+)\(['\"](.+?)['\"]\)", text, re.DOTALL)
    explained = re.search(r"Explanation: (.+?)(?: Found in <|$)", text, re.MULTILINE)
    if inner:
        said = inner[2]
    elif explained:
        said = explained[1]
    else:
        said = f"{type(error).__name__}: {_first_line(text)}"
        differing = re.search(r"differ in '(.+?)'", text)
        said += f" {differing[1]}" if differing else ""
    return short_text(said)


# From here on torch prints graphs, its own lines, and advice about its own tools.
_BEYOND = re.compile(
    r"^\s*(graph\(\):|While executing|Original traceback|from user code|Developer debug context|Found from"
    r"|Exception raised|Hint: Please open|args\[\d+\]:|The error above occurred|Use tlparse"
    r"|CUDA kernel errors might be|class .*\(torch\.nn\.Module\))",
    re.MULTILINE,
)
_MOST = 600


def short_text(text: str) -> str:
    """Returns a message of torch without graphs, without advice about torch's other tools, and of bounded length."""
    text = _BEYOND.split(text, maxsplit=1)[0]
    text = re.sub(
        r"INTERNAL ASSERT FAILED at .*?, please report a bug to PyTorch\.?", "an assertion of torch's failed.", text
    )
    kept = [line.strip() for line in text.splitlines()]
    kept = [
        line for line in kept if line and not re.search("TORCH_LOGS|TORCHDYNAMO|http|[Pp]lease file an issue", line)
    ]
    whole = "\n    ".join(kept[:12])
    return whole if len(whole) <= _MOST else f"{whole[: _MOST - 4]} ..."


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line.partition(" If you're using torch.compile")[0]  # the rest takes it for an error of torch


def raised_text(error: BaseException) -> str:
    """Returns an error's kind and message. One without a message has the line of torch's code that raised it."""
    said = f"{type(error).__name__}: {short_text(str(error))}".rstrip()
    if not said.partition("\n")[0].endswith("Error:"):
        return said
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    frames = traceback.extract_tb(error.__traceback__)
    raised = f", in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    first, line, rest = said.partition("\n")
    return f"{first} without a message{raised}{line}{rest}"
