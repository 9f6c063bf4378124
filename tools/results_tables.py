"""Writes the documents' numbers from benchmarks/results: `python -m tools.results_tables`.

Run it after a file in benchmarks changed. It writes docs/evidence/measurements.md, the generated sections of
docs/performance.md and README.md, and the plots if matplotlib is installed. A test fails when a document is stale.
Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from exportkit.bench import tables
from exportkit.bench.results import OURS, OURS_GRAPHS, Key, Results, Row
from tools.generated import DOCS, EVIDENCE, ROOT, with_section
from tools.results_plot import draw

README = ROOT / "README.md"
SUMMARY = DOCS / "performance.md"
MEASUREMENTS = EVIDENCE / "measurements.md"
_RESULTS = ROOT / "benchmarks" / "results"

# What the project set out to reach on one H200: milliseconds of the kernels of a forward call.
GOALS = {
    ("fused_texture", "32x3x1024x1024"): 0.265,
    ("scores_to_budgets", "B64 N4096 D1024 k200"): 0.31,
    ("top_k_patches", "B8 N4096 D1024 k200"): 0.015,
    ("rms_norm_quantize", "65536x1024"): 0.053,
    ("fused_layer_norm", "65536x1024"): 0.070,
    ("bias_relu", "65536x1024"): 0.070,
}


class ReadmeRow(NamedTuple):
    """A row of the README's table.

    Attributes:
        on_gpu: Whether it was measured on a GPU.
        subject: The operator or the package.
        size: Its size, as in the results.
        description: What the README calls it.
        dtype: The dtype of the results' row; None if there is one row only.
        times: The measurements under "exportkit", "eager" and "torch.compile".
    """

    on_gpu: bool
    subject: str
    size: str
    description: str
    dtype: str | None = None
    times: tuple[str, str, str] = (OURS, "eager", "compile")


# The packages of docs/performance.md; docs/evidence/measurements.md has all.
SHOWN_HALF = ("arr_coc_vit_small", "bfloat16")
SHOWN_SIZES = ("batch=1, gh=28, gw=28", "batch=64, gh=28, gw=28")

WITH_GRAPHS = (OURS_GRAPHS, "eager", "reduce-overhead")

# The last one is slower than its best alternative; the README shows that such operators exist.
README_ROWS = (
    ReadmeRow(
        True,
        "arr_coc_vit_small",
        "batch=1, gh=28, gw=28",
        "ARR-COC package with ViT-small, one image of 448x448",
        "float32",
    ),
    ReadmeRow(
        True,
        "arr_coc_vit_small",
        "batch=1, gh=28, gw=28",
        "the same in bfloat16, with CUDA graphs (torch.compile: `reduce-overhead`)",
        "bfloat16",
        WITH_GRAPHS,
    ),
    ReadmeRow(
        True, "arr_coc_features", "batch=64, gh=28, gw=28", "ARR-COC package without encoder, 64 images of 448x448"
    ),
    ReadmeRow(True, "fused_texture", "32x3x1024x1024", "operator `fused_texture`, 32 images of 1024x1024"),
    ReadmeRow(True, "top_k_patches", "B8 N4096 D1024 k200", "operator `top_k_patches`, 200 of 4096 patches, batch 8"),
    ReadmeRow(False, "fused_texture", "2x3x1024x1024", "operator `fused_texture`, 2 images of 1024x1024"),
    ReadmeRow(False, "relu", "4096x1024", "operator `relu`, 4096x1024"),
)

_HEAD = """\
# Measurements

Written by `make docs` from [benchmarks/results](../../benchmarks/results), which has every size with its command,
spread, alternatives, memory and errors. [performance.md](../performance.md) says how it was measured. "vs best" is
how many times as long the fastest alternative takes. Packages in half precision ran with CUDA graphs.
"""


def read(path: Path) -> Results:
    """Reads what `exportkit bench -o` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def merged(runs: Iterable[Results]) -> list[Results]:
    """Merges runs by device: the newest run's description, all commands, and the newest version of each row.

    A table of operators may need several runs. Each row keeps the limit measured in its run.
    """
    by_device: dict[str, list[Results]] = {}
    for run in sorted(runs, key=lambda run: run.created):
        by_device.setdefault(run.machine.device, []).append(run)
    return [
        msgspec.structs.replace(
            group[-1],
            command="\n".join(run.command for run in group),
            rows=tuple({row.key: row for run in group for row in run.rows}.values()),
        )
        for group in by_device.values()
    ]


def load_results(folder: Path = _RESULTS) -> list[Results]:
    """Returns one Results for each device, GPUs first."""
    found = merged(read(path) for path in sorted(folder.glob("*.json")))
    return sorted(found, key=lambda results: (results.machine.gpu is None, results.machine.device))


def readme_section(found: Sequence[Results], half: Sequence[Results]) -> str:
    """Returns the README's rows.

    Raises:
        StopIteration: The results do not have one of the rows.
    """
    rows = [(r.machine.gpu is not None, row) for r in (*found, *half) for row in forward(r)]
    lines = ["| milliseconds | on | exportkit | eager | torch.compile |", "| --- | --- | ---: | ---: | ---: |"]
    for wanted in README_ROWS:
        row = next(
            row
            for on_gpu, row in rows
            if (on_gpu, row.subject, row.size, row.dtype) == (*wanted[:3], wanted.dtype or row.dtype)
        )
        times = [row.time(name) for name in wanted.times]
        cells = [tables.number(timing.median) if timing else "-" for timing in times]
        lines.append(f"| {wanted.description} | {'GPU' if wanted.on_gpu else 'CPU'} | {' | '.join(cells)} |")
    machines = {results.machine.gpu is not None: results.machine for results in found}
    lines.append(f"\nMedians. GPU: {machines[True].device}. CPU: {machines[False].device}.")
    return "\n".join(lines) + "\n"


def summary(found: Sequence[Results], half: Sequence[Results]) -> str:
    """Returns a plot for each device, and the goals and the packages on a GPU.

    Args:
        found: What `load_results` returns.
        half: What `load_half_results` returns. Of these, the small encoder in bfloat16 is shown.
    """
    parts = []
    for results in found:
        parts += [f"### {results.machine.device}\n", f"{tables.heading(results)}\n", _plot_link(results)]
        if results.machine.gpu:
            rows = [row for row in forward(results) if row.key[:2] in GOALS]
            goals: dict[Key, float] = {row.key: GOALS[row.key[:2]] for row in rows}
            parts.append(tables.table(rows, full=False, goals=goals))
            packages = [row for row in results.rows if row.limit is None]
            packages += [row for run in half for row in run.rows if (row.subject, row.dtype) == SHOWN_HALF]
            if packages := [row for row in packages if row.size in SHOWN_SIZES]:
                parts.append(tables.table(packages, full=False))
    return "\n".join(parts)


def measurements(found: Sequence[Results], half: Sequence[Results], packages: Sequence[Results]) -> str:
    """Returns the text of docs/evidence/measurements.md."""
    parts = [_HEAD]
    for results in found:
        operators = [row for row in results.rows if row.limit is not None]
        parts += [f"## {results.machine.device}\n", f"{tables.heading(results)}\n"]
        for title, rows in (
            ("Calls", [row for row in operators if row.direction == "forward"]),
            ("Gradients", [row for row in operators if row.direction == "backward"]),
            ("Packages", [row for row in results.rows if row.limit is None]),
        ):
            if rows:
                parts += [f"### {title}\n", sizes_of_each(rows), *_listed(tables.notes(rows, errors=False))]
    parts.append("## Packages in half precision\n")
    parts += [f"{tables.heading(results)}\n\n{sizes_of_each(results.rows)}" for results in half]
    parts += ["## Packages on a CPU\n", runs_section(packages)]
    libraries = tables.libraries([row for results in found for row in results.rows])
    return "\n".join([*parts, "## Calls of other libraries\n", *_listed(libraries)])


def sizes_of_each(rows: Sequence[Row]) -> str:
    """Returns a table with a row for each operator and dtype: its slowest size, and how it compares at all sizes."""
    found: dict[tuple[str, str], list[tuple[float, str, float]]] = {}
    for row in rows:
        if (timing := row.time(OURS_GRAPHS) or row.time(OURS)) and row.best:
            found.setdefault((row.subject, row.dtype), []).append((timing.median, row.size, row.best[1]))
    lines = ["| what | slowest size: ms | vs best, all sizes |", "| --- | --- | --- |"]
    for (subject, dtype), sizes in sorted(found.items()):
        slowest, size, _ = max(sizes)
        ratios = sorted({f"{ratio:.2f}x" for _, _, ratio in sizes}, key=lambda text: float(text[:-1]))
        compared = " to ".join(dict.fromkeys((ratios[0], ratios[-1])))
        lines.append(f"| {subject}, {dtype} | {size}: {tables.number(slowest)} | {compared} |")
    return "\n".join(lines) + "\n"


def load_package_results(folder: Path = _RESULTS / "packages") -> list[Results]:
    """Returns the runs that timed packages beside every compiler, one for each number of threads."""
    return sorted(merged(read(path) for path in folder.glob("*.json")), key=lambda results: results.machine.threads)


def load_half_results(folder: Path = _RESULTS / "half") -> list[Results]:
    """Returns the packages in half precision: by model, dtype and size."""
    return [
        msgspec.structs.replace(run, rows=tuple(sorted(run.rows, key=_by_size)))
        for run in merged(read(path) for path in folder.glob("*.json"))
    ]


def _by_size(row: Row) -> tuple[object, ...]:
    batch, *sides = (int(number) for number in re.findall(r"\d+", row.size))
    return row.subject, row.dtype, sides, batch


def runs_section(runs: Iterable[Results]) -> str:
    """Returns a table for each run, with its machine."""
    parts = []
    for results in runs:
        parts += [f"{tables.heading(results)}\n", tables.table(results.rows, full=False)]
        parts += _listed(tables.notes(results.rows, errors=False))
    return "\n".join(parts)


def plot_of(results: Results) -> Path:
    """Returns the path of a device's plot."""
    return EVIDENCE / f"performance-{re.sub('[^a-z0-9]+', '-', results.machine.device.lower())}.svg"


def forward(results: Results) -> list[Row]:
    """Returns the rows that are not gradients."""
    return [row for row in results.rows if row.direction == "forward"]


def largest(rows: Iterable[Row]) -> list[Row]:
    """Returns for each operator the forward call that moves the most bytes, in the order of the rows."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.direction == "forward" and row.moved_bytes is not None:
            before = found.get(row.subject)
            if before is None or (before.moved_bytes or 0) < row.moved_bytes:
                found[row.subject] = row
    return list(found.values())


def _plot_link(results: Results) -> str:
    return f"![Time of every operator at its largest size, beside the alternatives](evidence/{plot_of(results).name})\n"


def _listed(lines: Iterable[str]) -> list[str]:
    text = [f"- {line}" for line in lines]
    return ["\n".join(text) + "\n"] if text else []


def documents() -> dict[Path, str]:
    """Returns the text of every document that has numbers from files, by its path."""
    found, half, packages = load_results(), load_half_results(), load_package_results()
    return {
        README: with_section(README.read_text(), "results", readme_section(found, half)),
        SUMMARY: with_section(SUMMARY.read_text(), "summary", summary(found, half)),
        MEASUREMENTS: measurements(found, half, packages),
    }


def write() -> None:
    """Writes the documents, and the plots."""
    for path, text in documents().items():
        path.write_text(text)
    found = load_results()
    if importlib.util.find_spec("matplotlib") is None:
        print("The plots were not drawn again: matplotlib is not installed.")
        return
    for results in found:
        if rows := largest(results.rows):
            draw(results, plot_of(results), rows)


if __name__ == "__main__":
    write()
