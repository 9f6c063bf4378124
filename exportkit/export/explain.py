"""Explains torch.export's errors in terms of the command line: which input, which line, what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from exportkit.errors import ExportError, ExportkitError
from exportkit.export.shapes import DynamicSizes
from exportkit.export.torch_internals import replaced
from exportkit.package.manifest import Size

_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/", "/lib/python3.")
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_SOURCE = re.compile(r"L\[['\"](?P<name>\w+)['\"]\](?P<path>.*?)\.size\(\)\[(?P<dim>\d+)\]")
_TRACED = re.compile(r'File "(.*?)", line (\d+), in (\w+)\n\s*(.*)')


@dataclass
class GuardLog:
    """The lines of the model's code that depended on a size, in the order in which they ran."""

    entries: list[tuple[ShapeEnv, object, traceback.FrameSummary | None]] = field(default_factory=list)

    def lines(self, places: Iterable[str]) -> list[str]:
        """Returns the lines that depended on one of the places, such as "image:2", each once."""
        wanted = set(places)
        found: dict[str, str] = {}
        for env, guard, frame in self.entries:
            sources = {symbol: _source_place(names) for symbol, names in env.var_to_sources.items()}
            symbols: set[sympy.Symbol] = getattr(guard, "free_symbols", set())
            if frame is None or not any(sources.get(symbol) in wanted for symbol in symbols):
                continue
            text = _relation(guard)
            for symbol in sorted(symbols, key=lambda symbol: -len(symbol.name)):
                text = re.sub(rf"\b{symbol.name}\b", sources.get(symbol) or symbol.name, text)
            # One line of code may need several conditions. The shortest is the clearest.
            found[_where(frame)] = min(found.get(_where(frame), text), text, key=len)
        return [f"{place} needs {text}" for place, text in found.items()]


@contextmanager
def guard_log() -> Iterator[GuardLog]:
    """Records which line of the model's code each guard on a size comes from.

    torch's own record (SLoc) has the line inside of torch, which does not help the user.
    """
    log = GuardLog()

    def recording(log_guard: Callable[..., None]) -> Callable[..., None]:
        def record(env: ShapeEnv, prefix: str, guard: object, *rest: Any, **named: Any) -> None:
            log.entries.append((env, guard, user_frame(traceback.extract_stack())))
            log_guard(env, prefix, guard, *rest, **named)

        return record

    with replaced(ShapeEnv, "_log_guard", recording):
        yield log


def user_frame(stack: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Returns the innermost frame outside of torch, other libraries and exportkit."""
    for frame in reversed(list(stack)):
        inside = frame.filename.startswith(_FOLDERS) or any(part in frame.filename for part in _LIBRARY_PARTS)
        if not inside and not frame.filename.startswith("<"):
            return frame
    return None


def where_raised(error: BaseException) -> str:
    """Returns the line of the model's code that raised an error, as "model.py:12 in forward: `x + 1`", or ""."""
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    return _where(frame) if frame else ""


def where_now() -> str:
    """Returns the line of the model's code that is running, or ""."""
    frame = user_frame(traceback.extract_stack())
    return _where(frame) if frame else ""


def where_traced(node: torch.fx.Node) -> str:
    """Returns the line of the model's code that a node of a graph was traced from, or ""."""
    stack = _TRACED.findall(node.meta.get("stack_trace") or "")
    frame = user_frame(traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in stack)
    return _where(frame) if frame else ""


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Runs the caller's code, and raises its errors as errors of that code.

    Args:
        doing: What the code does, for the message: "importing model.py".

    Raises:
        ExportError: The code raised an error, or tried to end the process.
    """
    try:
        yield
    except ExportkitError:
        raise
    except (Exception, SystemExit) as error:
        place = where_raised(error)
        raise ExportError(
            f"{doing} failed{' at ' + place if place else ''}: {type(error).__name__}: {error}",
            hint="--debug shows the whole traceback.",
        ) from error


def explain_export_error(error: Exception, sizes: DynamicSizes, log: GuardLog) -> ExportError:
    """Returns the error to raise instead of an error from torch.export.

    Args:
        error: torch.export's error.
        sizes: The sizes that vary.
        log: The guards of that run.
    """
    text = str(error)
    if "Constraints violated" in text:
        return _constraint_violation(text, sizes, log)
    place = where_raised(error)
    at = f" at {place}" if place else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        what = _first_line(text)
        return ExportError(
            f"the model branches on the value of a tensor{at}, which is unknown when the model is compiled ({what})",
            hint="Use torch.where(condition, a, b) or torch.cond instead of `if`, and torch.narrow or a mask for a "
            "size that depends on data. If such a size has a known range, state it with torch._check(n >= 1).",
        )
    for pattern, meaning, advice in _KNOWN:
        if re.search(pattern, text):
            return ExportError(f"{meaning}{at}: {_first_line(text)}", hint=advice)
    return ExportError(f"torch.export refused the model{at}: {type(error).__name__}: {_essence(text)}")


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
        r"torch\.jit|ScriptModule|ScriptObject",
        "the model contains TorchScript",
        "Export the original nn.Module. torch.export does not accept TorchScript.",
    ),
)


def _constraint_violation(text: str, sizes: DynamicSizes, log: GuardLog) -> ExportError:
    """Explains that the model does not accept every size that the caller declared."""
    violated = re.search(r"Constraints violated \(([^)]*)\)", text)
    names = re.findall(r"[A-Za-z_]\w*", violated[1]) if violated else []
    places = _places(sizes, names)
    lines = log.lines(place for name in names for place in places.get(name, ()))
    reasons = lines or [_readable(line) for line in re.findall(r"^  - (.*)$", text, re.MULTILINE)]
    about = ", ".join(f"`{name}` ({', '.join(places[name])})" for name in names if places.get(name)) or "a size"
    message = f"the model does not take every size that {about} was declared to have:" + "".join(
        f"\n    {reason}" for reason in dict.fromkeys(reasons)
    )
    advice = [line for fix in _fixes(text) if (line := _advice(fix, sizes, places))]
    if not advice:
        advice = ["a range in which that holds, or nothing for that place; or change that line"]
    return ExportError(message, hint="Write " + ",\n  or: ".join(advice) + ".")


@dataclass(frozen=True)
class _Fix:
    """One line of torch's suggestions: `name = right side`."""

    name: str
    value: str


def _fixes(text: str) -> list[_Fix]:
    _, _, suggested = text.partition("Suggested fixes:")
    return [_Fix(m[1], m[2].strip()) for m in re.finditer(r"^  (\w+) = (.+)$", suggested, re.MULTILINE)]


def _advice(fix: _Fix, sizes: DynamicSizes, places: Mapping[str, list[str]]) -> str | None:
    """Turns a suggestion into options of the command line. Returns None if it only supports another suggestion."""
    where = places.get(fix.name)
    if not where:
        return None
    if re.fullmatch(r"\d+", fix.value):
        return f"nothing for {' and '.join(where)}: that size is always {_at(fix, sizes)}"
    dimension = next(d for d in sizes.dimensions if d.name == fix.name)
    low, high = dimension.min, dimension.max
    if fix.value.startswith("Dim("):
        low = int(m[1]) if (m := re.search(r"min=(\d+)", fix.value)) else low
        high = int(m[1]) if (m := re.search(r"max=(\d+)", fix.value)) else high
        return _options(fix.name, sizes, low, high)
    if re.fullmatch(r"[A-Za-z]\w*", fix.value):
        renamed = " ".join(f"--dynamic {place}={fix.value}" for place in where)
        return f"{renamed} (one name: `{fix.name}` and `{fix.value}` must be equal)"
    if multiple := re.fullmatch(r"(\d+)\*_\w+", fix.value):
        factor = int(multiple[1])
        first = min(-(-low // factor) or 1, high // factor)
        return " ".join(f"--dynamic {place}={factor}*{fix.name}[{first}:{high // factor}]" for place in where)
    return f"{fix.name} = {fix.value} (torch's suggestion)"


def _options(name: str, sizes: DynamicSizes, low: int, high: int) -> str:
    options = []
    for tensor, dims in sizes.places.items():
        for dim, size in dims.items():
            if size.dimension == name:
                scale = f"{size.scale}*" if size.scale != 1 else ""
                offset = f"{size.offset:+d}" if size.offset else ""
                options.append(f"--dynamic {tensor}:{dim}={scale}{name}{offset}[{low}:{high}]")
    return " ".join(options)


def _at(fix: _Fix, sizes: DynamicSizes) -> str:
    size = next(s for dims in sizes.places.values() for s in dims.values() if s.dimension == fix.name)
    return str(size.scale * int(fix.value) + size.offset)


def _places(sizes: DynamicSizes, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the places of each name: {"gh": ["image:2"]}."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for tensor, dims in sizes.places.items():
        for dim, size in dims.items():
            found.setdefault(_name_of(size), []).append(f"{tensor}:{dim}")
    return found


def _name_of(size: Size) -> str:
    return size.dimension


def _source_place(sources: Iterable[object]) -> str | None:
    """Turns `L['image'].size()[2]` into "image:2". Nested inputs become "batch.mask:0"."""
    for source in sources:
        if match := _SOURCE.fullmatch(str(getattr(source, "name", ""))):
            path = "".join(f".{part}" for part in re.findall(r"\w+", match["path"]))
            return f"{match['name']}{path}:{match['dim']}"
    return None


def _readable(line: str) -> str:
    """Returns a line of torch's message with the places named as on the command line."""

    def place(match: re.Match[str]) -> str:
        path = "".join(f".{part}" for part in re.findall(r"\w+", match["path"]))
        return f"{match['name']}{path}:{match['dim']}"

    line = re.sub(r"\s*If you're using mark_dynamic.*", "", line)
    return _SOURCE.sub(place, line)


def _relation(guard: object) -> str:
    """Writes a guard in Python's notation, where SymPy has Eq(a, b)."""
    for kind, sign in ((sympy.Eq, "=="), (sympy.Ne, "!=")):
        if isinstance(guard, kind):
            return f"{guard.lhs} {sign} {guard.rhs}"
    return str(guard)


def _where(frame: traceback.FrameSummary) -> str:
    code = f": `{frame.line}`" if frame.line else ""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}{code}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _essence(text: str) -> str:
    """Returns the message without torch's advice about its other tools."""
    text = text.partition("The error above occurred when calling torch.export.export")[0]
    kept = [
        line for line in text.splitlines() if line.strip() and "TORCH_LOGS" not in line and "TORCHDYNAMO" not in line
    ]
    return "\n    ".join(kept[:20]) or "no message"
