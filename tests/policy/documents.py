"""Reads the code blocks of a Markdown document and runs them.

A comment on the line before a block says what happens to it:

- `<!-- run -->`: a console block's commands run in their order, and what they print on stdout must be what the block
  shows. A python block runs as a script.
- `<!-- run: cpp -->`: the same, but only on a machine that has what is named (see CAPABILITIES).
- `<!-- file: NAME -->`: the block is written to a file, for the blocks that follow.
- `<!-- in: PATH -->`: the block is an excerpt of a file of the repository, which has tests.
- `<!-- not run: REASON -->`: the block is never run.

All blocks of a document run in one shell, so `cd` and `export` last. A document may begin with `<!-- after: OTHER -->`:
then it runs after OTHER in the same folder, so that two documents need only one export.

In the output that a block shows, `...` stands for any number of lines. Times, sizes, versions and small differences are
not compared, because they depend on the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import torch

from exportkit.deployment.triton import triton_command
from exportkit.errors import HostError
from exportkit.runtime.native import library_path

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sys.executable).parent


def has_triton() -> bool:
    """Whether `exportkit triton --run` can start Triton."""
    try:
        return triton_command(Path("models")).found
    except HostError:  # the backend was not built
        return False


@dataclass(frozen=True)
class Capability:
    """What a block may need of the machine.

    Attributes:
        is_there: Whether this machine has it.
        required_by: The environment variable that promises it; a block is then run in any case.
        reason: What to say if it is missing.
    """

    is_there: Callable[[], bool]
    required_by: str
    reason: str


CAPABILITIES: Mapping[str, Capability] = {
    "cuda": Capability(torch.cuda.is_available, "EXPORTKIT_REQUIRE_CUDA", "this machine has no CUDA device"),
    "cpp": Capability(
        lambda: library_path().exists() and shutil.which("cmake") is not None,
        "EXPORTKIT_REQUIRE_RUNTIME",
        "the C++ runtime was not built, or there is no cmake",
    ),
    "triton": Capability(
        has_triton, "EXPORTKIT_REQUIRE_TRITON", "there is no tritonserver, or its backend was not built"
    ),
}

RUNNABLE = {"console", "python", "cpp", "bash", "sh"}
"""Languages whose blocks must say what happens to them."""

_FENCE = re.compile(
    r"(?:^ *<!-- (?P<marker>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.MULTILINE)
_SEPARATOR = "\x1e"


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        line: Of its fence, counted from 1.
        language: The word after the fence.
        marker: What the comment before it says, such as "run: cpp"; None without a comment.
        text: What is inside.
    """

    line: int
    language: str
    marker: str | None
    text: str

    @property
    def runs(self) -> bool:
        """Whether it is run on a machine that has what it needs."""
        return self.marker is not None and self.marker.partition(":")[0] == "run"

    @property
    def obstacle(self) -> str | None:
        """Why it is not run on this machine; None if it is run, or only written to a file."""
        kind, _, argument = (self.marker or "").partition(": ")
        if kind == "not run":
            return argument
        if kind == "run" and argument:
            needed = CAPABILITIES[argument]
            if os.environ.get(needed.required_by) != "1" and not needed.is_there():
                return needed.reason
        return None

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yields each command of a console block with the output that the block shows for it."""
        command: list[str] = []
        shown: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                if command:
                    yield "\n".join(command), shown
                command, shown = [line.removeprefix("$ ")], []
            elif command and command[-1].endswith("\\") and not shown:
                command.append(line)
            else:
                shown.append(line)
        if command:
            yield "\n".join(command), shown


@dataclass(frozen=True)
class Document:
    """A Markdown file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def blocks(self) -> list[Block]:
        """Its fenced blocks, in their order."""
        text = self.path.read_text()
        return [
            Block(text.count("\n", 0, m.start("language")) + 1, m["language"], m["marker"], dedent(m["text"]))
            for m in _FENCE.finditer(text)
        ]

    @property
    def after(self) -> Document | None:
        """The document that this one goes on from."""
        found = _AFTER.search(self.path.read_text())
        return Document(ROOT / found[1]) if found else None


def documents() -> list[Document]:
    """Returns the documents whose blocks say what happens to them: README, docs/ and the other pages at the top.

    Reports to torch are not among them: what they show is wrong.
    """
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    return [Document(path) for path in pages if path.parent.name != "upstream"]


def chains() -> list[list[Document]]:
    """Returns the documents that run something; those that go on from one another are together, in their order."""
    running = [document for document in documents() if any(block.runs for block in document.blocks)]

    def with_followers(document: Document) -> list[Document]:
        return [document, *(d for other in running if other.after == document for d in with_followers(other))]

    return [with_followers(document) for document in running if document.after is None]


@dataclass(frozen=True)
class Step:
    """A command, where it stands, and the output that the document shows; None if it shows nothing."""

    where: str
    command: str
    shown: list[str] | None


def steps(document: Document) -> Iterator[Step]:
    """Yields what can be run on this machine."""
    for block in document.blocks:
        where = f"{document.name}:{block.line}"
        if block.marker is not None and block.marker.startswith("file: "):
            yield Step(where, _heredoc(f"cat > {block.marker.removeprefix('file: ')}", block.text), None)
        elif block.runs and block.obstacle is None:
            if block.language == "python":
                yield Step(where, _heredoc("python -", block.text), None)
            else:
                for command, shown in block.commands():
                    yield Step(where, command, shown or None)


def run(document: Document, folder: Path, cache: Path, programs: Path = INSTALLED) -> None:
    """Runs a document in a folder.

    Args:
        document: What to run.
        folder: Where; it exists.
        cache: The folder of the package cache.
        programs: The folder of `exportkit` and `python`, which may leave out programs that are installed.

    Raises:
        AssertionError: A command failed, or printed something else than the document shows.
    """
    todo = list(steps(document))
    script = ["set -eu"]
    for step in todo:
        script += [f"printf '{_SEPARATOR}'", step.command]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EXPORTKIT_")},
        "PATH": os.pathsep.join([str(programs), str(INSTALLED), os.environ["PATH"]]),
        "EXPORTKIT_CACHE": str(cache),
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    _, *printed = done.stdout.split(_SEPARATOR)
    if done.returncode:
        failed = todo[max(len(printed), 1) - 1]
        said = "".join(printed[-1:]) + done.stderr
        raise AssertionError(f"{failed.where}: `{failed.command}` exited with {done.returncode}\n{said}")
    for step, output in zip(todo, printed):
        if step.shown is not None:
            assert agrees(step.shown, output.splitlines()), (
                f"{step.where}: `{step.command}` printed\n{output}\nand the document shows\n" + "\n".join(step.shown)
            )


def agrees(shown: Iterable[str], printed: Iterable[str]) -> bool:
    """Whether the printed lines are the shown ones, where `...` stands for any lines."""
    parts = [".*" if line.strip() == "..." else re.escape(_masked(line)) + "\n" for line in shown]
    return re.fullmatch("".join(parts), "".join(_masked(line) + "\n" for line in printed), re.DOTALL) is not None


_VARIES = (
    (re.compile(r"\d+(\.\d+)?(?= (ms|s|us|kB|MB|GB)\b)"), "N"),
    (re.compile(r"\b\d+(\.\d+)?e-\d+"), "N"),
    (re.compile(r"\b\d+\.\d+\.\d+[\w.+]*"), "VERSION"),
    (re.compile(r"\d+(?= edge cases)"), "N"),  # not those in which rounding decides
    (re.compile(r"\b(GLIBC|GLIBCXX)_[\d.]+"), "VERSION"),
)


def _masked(line: str) -> str:
    line = " ".join(line.split())
    for pattern, name in _VARIES:
        line = pattern.sub(name, line)
    return line


def _heredoc(command: str, text: str) -> str:
    assert "\nEOF\n" not in text
    return f"{command} <<'EOF'\n{text}EOF"
