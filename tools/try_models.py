"""Exports, packages and verifies the models of a list, and prints a row for each: what came of it, with which torch.

    python -m tools.try_models LIST [--only WORD]

A line of LIST is what `exportkit export` is given, `=>`, and what is right: nothing if the package agrees with eager,
or words that the refusal must have, such as

    models.py:Net --input x=float32[4,8] --dynamic 'x:0=batch[1:8]' =>
    models.py:Counting --input x=float32[4,8] => the model changes its buffers

Paths are relative to LIST. The exit code is 0 if every row is right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gallery.entries import LONGEST, NOISE
from tests.subprocesses import compiler_in_forkservers, run_exportkit

_SHAPES = "4"  # sizes that verify compares with eager, beside the recorded cases


@dataclass(frozen=True)
class Line:
    """A line of the list: the arguments of `export`, and words that the refusal must have (none: it agrees)."""

    arguments: tuple[str, ...]
    words: str


def lines(text: str) -> list[Line]:
    """Returns a list's lines, but for empty ones and comments."""
    split = (line.partition("=>") for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return [Line(tuple(shlex.split(left)), right.strip()) for left, _, right in split]


def seen(arguments: tuple[str, ...], folder: Path, where: Path) -> str:
    """Exports, packages and verifies a model; returns "agrees", or which step failed with which message."""
    made, package = folder / "made.pt2", folder / "package.pt2"
    libraries = [word for pair in itertools.pairwise(arguments) if pair[0] == "--op-library" for word in pair]
    steps = (
        ("export", *arguments, "-o", str(made)),
        ("package", str(made), *libraries, "--no-verify", "-o", str(package)),  # the next step does
        ("verify", str(package), "--shapes", _SHAPES, *_eager(arguments)),
    )
    for step in steps:
        done = run_exportkit(*step, "--json", cwd=where)
        if done.returncode:
            return f"{step[0]}, exit {done.returncode}: {_message(done)}"
    return "agrees"


def _eager(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what names the eager model in `verify`, which makes none from an exported program."""
    model = arguments[0]
    return () if model.endswith(".pt2") or "--input" in arguments else ("--model", model)


def _message(done: subprocess.CompletedProcess[str]) -> str:
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return done.stderr.strip()[-LONGEST:]
    if error := document.get("error"):
        return " / ".join(filter(None, (error["message"], error["hint"])))
    failed = [check["verdict"]["message"] for check in document["checks"] if check["verdict"]["exit_code"]]
    return failed[0] if failed else done.stderr.strip()[-LONGEST:]


def right(line: Line, outcome: str) -> bool:
    """Whether a line ended as it should: with the words that are asked for, and without torch's riddles."""
    if not line.words:
        return outcome == "agrees"
    return line.words in outcome and NOISE.search(outcome) is None and len(outcome) < LONGEST


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--only", default="", help="only lines with this word")
    chosen = parser.parse_args()
    where = chosen.list.resolve()
    table = [line for line in lines(where.read_text()) if chosen.only in " ".join(line.arguments)]
    print(f"| model | torch {torch.__version__} | seen | seconds |\n| --- | --- | --- | --- |")
    wrong = 0
    for line in table:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, compiler_in_forkservers():
            outcome = seen(line.arguments, Path(folder), where.parent)
        ended = right(line, outcome)
        wrong += not ended
        text = outcome.replace("\n", " / ").replace("|", r"\|")
        row = f"| `{line.arguments[0]}` | {'right' if ended else 'NOT'} | {text} | {time.monotonic() - started:.0f} |"
        print(row, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
