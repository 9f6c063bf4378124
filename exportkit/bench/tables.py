"""Results as Markdown that reads as plain text too. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exportkit.bench.results import OURS, Key, Results, Row, Timing

_NAMES = {OURS: "exportkit", "compile": "torch.compile"}


def table(
    rows: Sequence[Row],
    *,
    spread: bool = True,
    memory: bool = True,
    goals: Mapping[Key, float] | None = None,
) -> str:
    """A Markdown table, its columns aligned.

    Args:
        rows: With one limit or none; columns are those that any row has.
        spread: Show half the distance between the quartiles beside ours.
        memory: Show the peak memory of ours and of eager.
        goals: Milliseconds that were aimed at, by the rows' keys.
    """
    others = list(dict.fromkeys(m.name for row in rows for m in row.measurements if m.name != OURS))
    limits = any(row.limit is not None for row in rows)
    directions, dtypes = {row.direction for row in rows}, {row.dtype for row in rows}
    memory = memory and any(m.peak_bytes is not None for row in rows for m in row.measurements)
    head = ["what", "size", *(["dtype"] if len(dtypes) > 1 else []), "exportkit ms", *(["goal ms"] if goals else [])]
    head += [f"{title(name)} ms" for name in others]
    head += [*(["limit ms", "of limit"] if limits else []), "vs best", *(["memory", "eager memory"] if memory else [])]
    lines = [head]
    for row in rows:
        subject = row.subject + (" gradient" if row.direction == "backward" and len(directions) > 1 else "")
        ours = row.time(OURS)
        line = [subject, row.size, *([row.dtype] if len(dtypes) > 1 else []), _time_text(ours, spread)]
        if goals:
            line.append(number(goals[row.key]))
        line += [_time_text(row.time(name), False) + _launches(row, name) for name in others]
        if limits:
            line += [number(row.limit), f"{row.of_limit:.0%}" if row.of_limit is not None else ""]
        line.append(_ratio_text(row))
        if memory:
            line += [_memory_text(row, OURS), _memory_text(row, "eager")]
        lines.append(line)
    return _aligned(lines)


def heading(results: Results) -> str:
    """The machine and the run in one paragraph."""
    machine = results.machine
    where = f"{machine.gpu}, driver {machine.driver or 'unknown'}, CUDA {machine.cuda}" if machine.gpu else machine.cpu
    threads = f"{machine.threads} of {machine.cores} cores" if not machine.gpu else f"host {machine.cpu}"
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


def _time_text(timing: Timing | None, spread: bool) -> str:
    if timing is None:
        return "-"
    return number(timing.median) + (f" ±{timing.spread:.0%}" if spread else "")


def _launches(row: Row, name: str) -> str:
    """Marks a time that has Python's launches in it, where ours has not: they could not be captured."""
    ours, other = row.get(OURS), row.get(name)
    return " (call)" if ours and other and ours.kernels and other.call and not other.kernels else ""


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


def _memory_text(row: Row, name: str) -> str:
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
