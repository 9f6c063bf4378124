"""Writes docs/performance.md and the README's section from benchmarks/results: `python -m exportkit.bench.document`.

A test fails when they are stale. The plots are drawn where matplotlib is installed. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from exportkit.bench import tables
from exportkit.bench.plot import draw
from exportkit.bench.results import Results, Row, merged, read

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
_RESULTS = ROOT / "benchmarks" / "results"
_BETWEEN = re.compile(r"(?<=<!-- performance: written by `make docs` -->\n).*?(?=<!-- /performance -->)", re.DOTALL)

# What the project set out to reach on one H200: milliseconds of the kernels of a forward call.
GOALS = {
    ("fused_texture", "32x3x1024x1024"): 0.265,
    ("scores_to_budgets", "B64 N4096 D1024 k200"): 0.31,
    ("top_k_patches", "B8 N4096 D1024 k200"): 0.015,
    ("rms_norm_quantize", "65536x1024"): 0.053,
    ("fused_layer_norm", "65536x1024"): 0.070,
    ("bias_relu", "65536x1024"): 0.070,
}

_METHOD = """\
# Performance

Written by `make docs` from [benchmarks/results](../benchmarks/results), which `exportkit bench` wrote; do not edit.

Every row is one run on one machine: the alternatives take turns, sample by sample, so that what drifts drifts for all
of them, and inputs rotate, so that caches hold no more of them than in use. Results are compared with the reference's
before anything is timed. Times are medians, `±` half the distance between the quartiles. On a GPU those of operators
are of the kernels, replayed from a CUDA graph, for the alternatives too; where one cannot be captured its call is
shown, and compared with the **call** of ours, which has Python's launches in it.

- **eager** is the ATen reference, **torch.compile** the same compiled for these sizes; **library** is named below each
  table.
- **limit** is the time that the bytes which must move (inputs read once, outputs written once) take at the rate of a
  large copy in the same run. Above 100 % a cache held what the copy had to move.
- **vs best** is how many times as long the fastest alternative takes.
- **memory** is the most that a call had allocated, its outputs included.
- A **gradient** is the backward pass alone.
"""


def load_results(folder: Path = _RESULTS) -> list[Results]:
    """One for each device, GPUs first."""
    found = merged(read(path) for path in sorted(folder.glob("*.json")))
    return sorted(found, key=lambda results: (results.machine.gpu is None, results.machine.device))


def readme_section(found: Sequence[Results]) -> str:
    """The goals and the packages on a GPU, the largest size of everything on a CPU."""
    parts = []
    for results in found:
        parts.append(f"{tables.heading(results)}\n")
        if results.machine.gpu:
            rows = [row for row in results.rows if row.direction == "forward" and row.key[:2] in GOALS]
            if rows:
                goals = {row.key: GOALS[row.key[:2]] for row in rows}
                parts.append(tables.table(rows, full=False, goals=goals))
            if packages := [row for row in results.rows if row.limit is None]:
                parts.append(tables.table(packages, full=False))
        else:
            parts.append(tables.table(largest(results.rows), full=False))
    parts.append(
        "Milliseconds, medians; the limit is a copy of the bytes that must move; above 1x ours is the faster. "
        "[docs/performance.md](docs/performance.md) has every size, the gradients, the method and the plots; "
        "`exportkit bench` measures your machine.\n"
    )
    return "\n".join(parts)


def with_performance(readme: str, found: Sequence[Results]) -> str:
    """The README with the section of these results."""
    return _BETWEEN.sub(lambda _: readme_section(found), readme)


def performance(found: Sequence[Results]) -> str:
    """The text of docs/performance.md."""
    parts = [_METHOD]
    for results in found:
        operators = [row for row in results.rows if row.limit is not None]
        parts += [f"## {results.machine.device}\n", f"{tables.heading(results)}\n"]
        if largest(results.rows):
            parts.append(
                f"![Bars of every operator at its largest size beside the alternatives]({plot_of(results).name})\n"
            )
        for title, rows in (
            ("Calls", [row for row in operators if row.direction == "forward"]),
            ("Gradients", [row for row in operators if row.direction == "backward"]),
            ("Packages", [row for row in results.rows if row.limit is None]),
        ):
            if rows:
                parts += [f"### {title}\n", tables.table(rows)]
                parts += _listed((*tables.libraries(rows), *tables.notes(rows)))
        parts += ["Made by:\n", *_listed(f"`{command}`" for command in results.command.splitlines())]
    return "\n".join(parts)


def plot_of(results: Results) -> Path:
    """Where a device's plot lies."""
    return PERFORMANCE.with_name(f"performance-{re.sub('[^a-z0-9]+', '-', results.machine.device.lower())}.svg")


def largest(rows: Iterable[Row]) -> list[Row]:
    """Of each operator's calls the size that moves most, in the order of the rows."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.direction == "forward" and row.moved_bytes is not None:
            before = found.get(row.subject)
            if before is None or (before.moved_bytes or 0) < row.moved_bytes:
                found[row.subject] = row
    return list(found.values())


def _listed(lines: Iterable[str]) -> list[str]:
    text = [f"- {line}" for line in lines]
    return ["\n".join(text) + "\n"] if text else []


def write() -> None:
    """Writes both documents, and the plots."""
    found = load_results()
    README.write_text(with_performance(README.read_text(), found))
    PERFORMANCE.write_text(performance(found))
    for results in found:
        if rows := largest(results.rows):
            draw(results, plot_of(results), rows)


if __name__ == "__main__":
    write()
