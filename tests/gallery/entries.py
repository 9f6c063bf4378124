"""The gallery's modules as a list, and how one is exported."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli.app import main
from tests.fixtures import stable_library

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
LIBRARY = "libexportkit_gallery.so"
THEMES = ("sizes", "values", "fixed", "flow", "programs", "structures", "operators")
# What torch says to its own developers, and what no message of exportkit may have.
NOISE = re.compile(
    r"Traceback|TORCH_LOGS|def forward\(self, arg0_1|INTERNAL ASSERT|[Pp]lease file an issue|report a bug|graph\(\):"
    r"|placeholder\[|eval_with_key|While executing|from user code|AssertionError:?\s*$|<bound method|bug in exportkit",
    re.MULTILINE,
)
LINES = re.compile(r"^(?:- |\| )`(\w+)`", re.MULTILINE)  # of the pages: one for each module
_USUAL_INPUTS = ("x=float32[4,3]",)
LONGEST = 1500  # letters of a message
_ISSUE = re.compile(r"\b(pytorch|ao|executorch|TICO|kserve|onnxruntime|onnxscript|norse)#(\d+)")


@dataclass(frozen=True)
class Entry:
    """A module of the gallery. The attributes of its class say how it is exported and what is expected.

    A class without `inputs` is called with _USUAL_INPUTS, and one with `says` ends with the exit code 5.

    Attributes:
        theme: Its file.
        name: Its class.
        summary: What is troublesome, with the issues that report it.
        arguments: What `exportkit export` is given, MODEL first.
        exit_code: The exit code expected.
        says: A part of the message expected; empty if it exports.
        since: The first version of torch that was seen to end so. Older ones refuse the module.
        onnx: What the ONNX gallery expects instead of `says`, "" if it is verified; None: it has no such module.
    """

    theme: str
    name: str
    summary: str
    arguments: Sequence[str]
    exit_code: int
    says: str
    since: str = ""
    onnx: str | None = None

    @property
    def issues(self) -> list[tuple[str, str]]:
        """The repository and the number of each issue."""
        return [(match[1], match[2]) for match in _ISSUE.finditer(self.summary)]


@dataclass(frozen=True)
class Outcome:
    """What an export ended with.

    Attributes:
        exit_code: Its exit code.
        document: The document that --json prints.
        stderr: What else was written, without the lines of progress.
    """

    exit_code: int
    document: dict
    stderr: str

    @property
    def message(self) -> str:
        """The error and its hint, without the numbers that every run draws anew; empty if the export succeeded."""
        error = self.document.get("error", {"message": "", "hint": None})
        text = "\n".join(filter(None, (error["message"], error["hint"])))
        return re.sub(r"\b\d+\.\d{5,}", "...", text.replace(f"{ROOT}/", ""))


def entries(folder: Path = FOLDER, themes: Sequence[str] = THEMES) -> list[Entry]:
    """Returns every module, in the order of the files, which are read and not imported."""
    found = []
    for theme in themes:
        path = folder / f"{theme}.py"
        tree = ast.parse(path.read_text())
        library = ["--op-library", LIBRARY] if "library" in _literals(tree) else []
        modules = [node for node in tree.body if isinstance(node, ast.ClassDef) and "nn.Module" in _bases(node)]
        found += [_entry(path, node, library) for node in modules]
    return found


def one_of_each_theme_is_quick(modules: Sequence[Entry]) -> list[Any]:
    """Returns parameters of a test: the first module of each theme, and the others, which are slow."""
    first = {entry.theme: entry for entry in reversed(modules)}
    return [
        pytest.param(
            entry, id=f"{entry.theme}.{entry.name}", marks=() if first[entry.theme] is entry else pytest.mark.slow
        )
        for entry in modules
    ]


def _entry(path: Path, node: ast.ClassDef, library: Sequence[str]) -> Entry:
    said = _literals(node)
    has_maker = any(isinstance(part, ast.FunctionDef) and part.name == "make" for part in node.body)
    inputs = said.get("inputs", () if has_maker else _USUAL_INPUTS)
    arguments = [f"{path.relative_to(ROOT)}:{node.name}{'.make' if has_maker else ''}", *library]
    for option, texts in (("--input", inputs), ("--dynamic", said.get("dynamic", ()))):
        arguments += [word for text in texts for word in (option, text)]
    return Entry(
        path.stem,
        node.name,
        ast.get_docstring(node) or "",
        arguments,
        said.get("exit_code", 5 if "says" in said else 0),
        said.get("says", ""),
        said.get("since", ""),
        said.get("onnx"),
    )


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _literals(node: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """Returns what a file or a class assigns to plain names."""
    return {
        part.targets[0].id: ast.literal_eval(part.value)
        for part in node.body
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name) and _is_literal(part.value)
    }


def _is_literal(value: ast.expr) -> bool:
    return all(isinstance(part, (ast.Constant, ast.Tuple, ast.Load)) for part in ast.walk(value))


def export(entry: Entry, output: Path, form: str = "program") -> Outcome:
    """Exports a module in a format, in this process. The working directory is the repository's."""
    arguments = [str(operator_library()) if argument == LIBRARY else argument for argument in entry.arguments]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(["export", *arguments, "--format", form, "-o", str(output), "--json"])
    lines = [line for line in stderr.getvalue().splitlines() if not line.endswith(" ...")]
    return Outcome(code, json.loads(stdout.getvalue()), "\n".join(lines))


def operator_library() -> Path:
    """Returns the library of operators.cpp. Builds it once for this source and this torch."""
    return stable_library.build(FOLDER / "operators.cpp", name="exportkit_gallery")
