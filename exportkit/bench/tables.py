"""Results as Markdown that reads as plain text too. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from exportkit.bench.results import OURS, Key, Results, Row, Timing

_NAMES = {OURS: "exportkit", "compile": "torch.compile"}


def table(
    rows: Sequence[Row],
    *,
    full: bool = True,
    goals: Mapping[Key, float] | None = None,
) -> str:
    """A Markdown table, its columns aligned.

    Args:
        rows: With one limit or none; columns are those that any row has.
        full: Show half the distance between the quartiles beside ours, its call where the time is of the kernels, and
            the peak memory of ours and of eager.
        goals: Milliseconds that were aimed at, by the rows' keys.
    """
    directions, dtypes = {row.direction for row in rows}, {row.dtype for row in rows}
    names = list(dict.fromkeys(m.name for row in rows for m in row.measurements if m.name != OURS))
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("what", lambda row: row.subject + " gradient" * (row.direction == "backward" and len(directions) > 1)),
        ("size", lambda row: row.size),
    ]
    if len(dtypes) > 1:
        columns.append(("dtype", lambda row: row.dtype))
    columns.append(("exportkit ms", lambda row: _time_text(row.time(OURS), spread=full)))
    if goals:
        columns.append(("goal ms", lambda row: number(goals[row.key])))
    if full and any(ours.kernels for row in rows if (ours := row.get(OURS))):
        columns.append(("its call ms", _call_text))
    columns += [(f"{title(name)} ms", partial(_other_text, name)) for name in names]
    if any(row.limit is not None for row in rows):
        columns.append(("limit ms", lambda row: number(row.limit)))
        columns.append(("of limit", lambda row: "" if row.of_limit is None else f"{row.of_limit:.0%}"))
    columns.append(("vs best", _ratio_text))
    if full:
        columns.append(("memory", partial(_memory_text, OURS)))
        columns.append(("eager memory", partial(_memory_text, "eager")))
    return _aligned([[head for head, _ in columns], *([cell(row) for _, cell in columns] for row in rows)])


def heading(results: Results) -> str:
    """The machine and the run in one paragraph."""
    machine = results.machine
    where = f"{machine.gpu}, driver {machine.driver or 'unknown'}, CUDA {machine.cuda}" if machine.gpu else machine.cpu
    threads = (
        f"{machine.threads} threads on {machine.cores} cores, load {machine.load:g}"
        if not machine.gpu
        else f"host {machine.cpu}"
    )
    commit = f" at {results.commit[:12]}{'+' if results.commit.endswith('+') else ''}" if results.commit else ""
    return (
        f"{where}, {threads}; torch {machine.torch}, Python {machine.python}, exportkit {results.exportkit}{commit}; "
        f"{results.created[:10]}. A large copy runs at {results.copy_gb_s:.0f} GB/s (read and written)."
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """What loading took; what is missing and why, once each."""
    loads = {m.name: m.load_ms for row in rows for m in row.measurements if m.load_ms is not None}
    loaded = ["loading took " + ", ".join(f"{title(name)} {ms:.0f} ms" for name, ms in loads.items())] if loads else []
    found: dict[str, list[str]] = {}
    for row in rows:
        for measurement in row.measurements:
            if measurement.note:
                found.setdefault(f"{title(measurement.name)}: {measurement.note}", []).append(row.subject)
    return loaded + [f"{note} ({', '.join(dict.fromkeys(subjects))})" for note, subjects in found.items()]


def libraries(rows: Sequence[Row]) -> list[str]:
    """What was called as the library's alternative, by operator."""
    found = {row.subject: m.what for row in rows for m in row.measurements if m.name == "library"}
    return [f"{subject}: {what}" for subject, what in found.items()]


def title(name: str) -> str:
    """What a reader calls it."""
    return _NAMES.get(name, name)


def _time_text(timing: Timing | None, *, spread: bool = False) -> str:
    if timing is None:
        return "-"
    return number(timing.median) + (f" ±{timing.spread:.0%}" if spread else "")


def _call_text(row: Row) -> str:
    """What our call takes with Python's launches in it."""
    ours = row.get(OURS)
    return _time_text(ours.call if ours else None)


def _other_text(name: str, row: Row) -> str:
    """Its time; marked where it has Python's launches in it and ours has not, since it could not be captured."""
    ours, other = row.get(OURS), row.get(name)
    launches = ours and ours.kernels and other and other.call and not other.kernels
    return _time_text(row.time(name)) + (" (call)" if launches else "")


def number(value: float | None) -> str:
    """Three digits that matter, without an exponent."""
    if value is None:
        return ""
    for digits, least in ((0, 100), (1, 10), (2, 1), (3, 0.1), (4, 0.01)):
        if value >= least:
            return f"{value:.{digits}f}"
    return f"{value:.5f}"


def _ratio_text(row: Row) -> str:
    """`4.2x (compile)`: how many times as long the fastest alternative takes."""
    if row.best is None:
        return ""
    name, ratio = row.best
    return f"{ratio:.2f}x ({name})" if ratio < 10 else f"{ratio:.0f}x ({name})"


def _memory_text(name: str, row: Row) -> str:
    found = row.get(name)
    if found is None or found.peak_bytes is None:
        return ""
    mb = found.peak_bytes / 1e6
    return f"{mb:.0f} MB" if mb >= 10 else f"{mb:.1f} MB"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def text(cells: Sequence[str]) -> str:
        # Names to the left, numbers to the right.
        padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([text(lines[0]), rule, *(text(line) for line in lines[1:])]) + "\n"
