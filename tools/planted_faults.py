"""Writes docs/evidence/planted-faults.md, the planted faults that `exportkit ops check` finds.

    python -m tools.planted_faults run
    python -m tools.planted_faults

The first checks every operator of tests/operators/planted and keeps what was found in benchmarks/operators. The second
writes the page. A fault is checked by what is meant to find it, since a check that finds something leaves others out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from exportkit.operators.tools.checking import Checked, CheckOptions, check_source
from exportkit.operators.tools.source import parse_source
from tests.operators.planted.table import PLANTED, PYTHON, RIGHT, Planted, library
from tests.subprocesses import compiler_in_forkservers
from tools.generated import EVIDENCE, ROOT, in_lines

DOCUMENT = EVIDENCE / "planted-faults.md"
RUN = ROOT / "benchmarks" / "operators" / "planted-faults.json"
SEEDS = range(5)


def checked(operators: Sequence[str], seed: int, only: Sequence[str] = (), **options: Any) -> Iterator[Checked]:
    """Runs `exportkit ops check` on planted operators, with drawn calls."""
    names = tuple(f"planted::{name}" for name in operators)
    source, libraries = parse_source(str(PYTHON), models=False), (str(library()),)
    given = CheckOptions(operators=names, only=tuple(only), libraries=libraries, seed=seed, **options)
    return check_source(source, given, lambda step: None)


def found(operators: Sequence[str], seed: int, only: Sequence[str] = (), **options: Any) -> dict[str, list[str]]:
    """Returns the checks that found something, by operator."""
    return {
        each.report.operator.removeprefix("planted::"): [finding.check for finding in each.report.findings]
        for each in checked(operators, seed, only, **options)
    }


def meant(fault: Planted) -> tuple[str, ...]:
    """Returns the checks to make that are meant to find a fault. One makes calls without elements, which may crash."""
    return tuple(name for name in fault.checks if name != "crash") or ("empty",) * len(fault.checks)


def runs() -> Iterator[dict[str, Any]]:
    """Checks all with one seed after the other, and yields what is known after each."""
    results: dict[str, dict[str, list[str]]] = {fault.operator: {} for fault in PLANTED}
    groups: dict[tuple[str, ...], list[str]] = {}
    for fault in PLANTED:
        groups.setdefault(meant(fault), []).append(fault.operator)
    for seed in SEEDS:
        for only, names in groups.items():
            if only or not seed:  # without a name, all checks
                for name, checks in found(names, seed, only).items():
                    results[name][str(seed)] = checks
        if not seed:
            reference = {"planted::wrong_constant": f"{PYTHON}:half"}
            with_reference = found(["wrong_constant"], 0, ["reference"], references=reference)
            right = found(RIGHT, 0, sorted({check for only in groups for check in only}))
        yield {"torch": str(torch.__version__), "found": results, "right": right, "with_reference": with_reference}


def is_found(fault: Planted, run: dict[str, Any]) -> bool:
    """Whether the checks that are meant to find a fault did so with each seed."""
    seeds = run["found"][fault.operator].values()
    return bool(fault.checks) and all(set(fault.checks) & set(one) for one in seeds)


TEXT = """# Planted faults

{count} operators with one fault each ([kernels](../../tests/operators/planted/kernels.cpp),
[Python](../../tests/operators/planted/in_python.py)) were given to `exportkit ops check` with torch {torch} on a CPU:
drawn calls alone, without reference. **{found} were found with each of {seeds} seeds**, by the checks meant to find
them. In {right} right operators, these checks found {wrong}.

{groups}
Not found: {missed}. {reference}

`make docs` writes this page.
"""


def page(run: dict[str, Any]) -> str:
    """Returns the page."""
    groups: dict[str, list[str]] = {}
    for fault in PLANTED:
        if is_found(fault, run):
            seeds = run["found"][fault.operator].values()
            checks = (*fault.checks, "crash")
            named = next((check for check in checks if all(check in one for one in seeds)), fault.checks[0])
            groups.setdefault(named, []).append(fault.truth)
    missed = [fault.truth for fault in PLANTED if not is_found(fault, run)]
    wrong = [f"`{check}` in `{name}`" for name in RIGHT for check in run["right"][name]]
    found_with_one = "reference" in run["with_reference"]["wrong_constant"]
    return TEXT.format(
        count=len(PLANTED),
        seeds=min(len(run["found"][fault.operator]) for fault in PLANTED if is_found(fault, run)),
        found=len(PLANTED) - len(missed),
        torch=run["torch"],
        right=len(RIGHT),
        wrong=", ".join(wrong) or "nothing",
        groups="".join(f"- `{check}`: {'; '.join(truths)}.\n" for check, truths in groups.items()),
        missed="; ".join(missed),
        reference="`--reference` finds the wrong factor." if found_with_one else "",
    )


def main() -> None:
    """Makes the run, if it is asked for, and writes the page."""
    if sys.argv[1:] == ["run"]:
        with compiler_in_forkservers():
            for known in runs():
                RUN.write_text(in_lines(known) + "\n")
    DOCUMENT.write_text(page(json.loads(RUN.read_text())))


if __name__ == "__main__":
    main()
