"""Writes docs/evidence/libraries.md from results of `python -m tools.libraries`."""

from __future__ import annotations

from collections.abc import Sequence

from tools.generated import EVIDENCE
from tools.libraries.library import Library
from tools.libraries.rows import ROWS
from tools.libraries.steps import STEPS, Result

DOCUMENT = EVIDENCE / "libraries.md"
_WORDS = 18  # of a note
_INTRODUCTION = """\
# Libraries of others

Written by [`python -m tools.libraries`](../../tools/libraries). ✓: the step succeeded. A number: the sentence below.
A word: a finding of [the check](../operator-check.md); today `opcheck-dynamic` is what `training-compiles` was, and
`opcheck-autograd` what `gradient-recorded` was. `load` calls the package where the library is missing, and compares
with eager; `run` is `exportkit-run`.
"""


def page(results: Sequence[Result], rows: Sequence[Library] = ROWS) -> str:
    """Returns the page: a row for each library and device that was tried, and for those of which nothing can be had.

    The last result of each stands.
    """
    last = {(result["name"], result["device"]): result for result in results}
    notes: dict[str, int] = {}
    lines = [_INTRODUCTION, f"|library|device|torch|{'|'.join(STEPS)}|in the package|", f"|---|---|---|{'---|' * 8}"]
    for row in rows:
        name = row.name + (f" [{_number(row.note, notes)}]" if row.note else "")
        if row.spec is None:
            lines.append(f"|{name}|{', '.join(row.devices)}|{'|' * 9}")
        for device in row.devices:
            if result := last.get((row.name, device)):
                cells = [_cell(step, result["steps"].get(step), notes) for step in STEPS]
                files = "<br>".join(f"`{name}`" for name in result["libraries"])
                lines.append(f"|{name}|{device}|{result['torch'].partition('+')[0]}|{'|'.join(cells)}|{files}|")
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())]) + "\n"


def _cell(step: str, said: Result | None, notes: dict[str, int]) -> str:
    if said is None:
        return ""
    if not said["ok"]:
        findings = said["said"].split(", ") if step == "check" else ()
        named = bool(findings) and not any(" " in finding for finding in findings)
        return "<br>".join(findings) if named else str(_number(said["said"], notes))
    return said["said"].split()[0] if step == "list" else "✓"


def _number(note: str, notes: dict[str, int]) -> int:
    words = note.split()
    short = " ".join(words[:_WORDS]) + (" ..." if len(words) > _WORDS else "")
    return notes.setdefault(short, len(notes) + 1)
