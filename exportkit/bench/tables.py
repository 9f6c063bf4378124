"""Formats results as Markdown that is readable as plain text. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from exportkit.bench.results import Key, Results, Row, Timing

_NAMES = {"compile": "torch.compile", "onnxruntime": "ONNX Runtime"}


def table(
    rows: Sequence[Row],
    *,
    full: bool = True,
    goals: Mapping[Key, float] | None = None,
) -> str:
    """Returns a Markdown table with aligned columns, each of which any row has a value for.

    In full, it also shows half the distance between the quartiles of exportkit's time, the time of its call if the main
    time is the kernels', the limit, errors in parentheses, and the peak memory of exportkit and eager. `goals` are
    times in milliseconds, by the rows' keys.
    """
    directions, dtypes = {row.direction for row in rows}, {row.dtype for row in rows}
    names = list(dict.fromkeys(m.name for row in rows for m in row.measurements[1:]))
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("what", lambda row: row.subject + " gradient" * (row.direction == "backward" and len(directions) > 1)),
        ("size", lambda row: row.size),
    ]
    if len(dtypes) > 1:
        columns.append(("dtype", lambda row: row.dtype))
    columns.append((f"{title(rows[0].ours.name)} ms", partial(_our_text, full)))
    if goals:
        columns.append(("goal ms", lambda row: number(goals[row.key])))
    if full and any(row.ours.kernels for row in rows):
        columns.append(("its call ms", _call_text))
    columns += [(f"{title(name)} ms", partial(_other_text, name, full)) for name in names]
    if any(row.limit is not None for row in rows):
        if full:
            columns.append(("limit ms", lambda row: number(row.limit)))
        columns.append(("of limit", lambda row: "" if row.of_limit is None else f"{row.of_limit:.0%}"))
    columns.append(("vs best", _ratio_text))
    if full:
        columns.append(("memory", lambda row: _memory_text(row.ours.name, row)))
        if "eager" in names:
            columns.append(("eager memory", partial(_memory_text, "eager")))
    return _aligned([[head for head, _ in columns], *([cell(row) for _, cell in columns] for row in rows)])


def heading(results: Results) -> str:
    """Returns the machine and the run in one paragraph."""
    machine = results.machine
    where = f"{machine.gpu}, driver {machine.driver or 'unknown'}, CUDA {machine.cuda}" if machine.gpu else machine.cpu
    threads = (
        f"{machine.threads} thread{'s' * (machine.threads != 1)} on {machine.cores} cores, load {machine.load:g}"
        if not machine.gpu
        else f"host {machine.cpu}"
    )
    commit = f" at {results.commit[:12]}{'+' if results.commit.endswith('+') else ''}" if results.commit else ""
    return (
        f"{where}, {threads}; torch {machine.torch}, Python {machine.python}, exportkit {results.exportkit}{commit}; "
        f"{results.created[:10]}. A large copy runs at {results.copy_gb_s:.0f} GB/s (read and written)."
    )


def notes(rows: Sequence[Row], *, errors: bool = True) -> list[str]:
    """Returns loading times, what is missing and why, once each, and with `errors` what they are."""
    loads = {m.name: m.load_ms for row in rows for m in row.measurements if m.load_ms is not None}
    loaded = ["loading took " + ", ".join(f"{title(name)} {ms:.0f} ms" for name, ms in loads.items())] if loads else []
    if errors and any(m.error is not None for row in rows for m in row.measurements):
        loaded.append("in parentheses: the rms error of the least accurate output, against the model in a wider dtype")
    found: dict[str, list[str]] = {}
    for row in rows:
        for measurement in row.measurements:
            if measurement.note:
                found.setdefault(f"{title(measurement.name)}: {measurement.note}", []).append(row.subject)
    return loaded + [f"{note} ({', '.join(dict.fromkeys(subjects))})" for note, subjects in found.items()]


def libraries(rows: Sequence[Row]) -> list[str]:
    """Returns the library calls that were timed, by operator."""
    found = {row.subject: m.what for row in rows for m in row.measurements if m.name == "library"}
    return [f"{subject}: {what}" for subject, what in found.items()]


def title(name: str) -> str:
    """Returns a measurement's name for readers."""
    return _NAMES.get(name, name)


def _time_text(timing: Timing | None, *, spread: bool = False) -> str:
    if timing is None:
        return "-"
    return number(timing.median) + (f" ±{timing.spread:.0%}" if spread else "")


def _error_text(name: str, row: Row) -> str:
    found = row.get(name)
    return "" if found is None or found.error is None else f" ({found.error:.1e})"


def _call_text(row: Row) -> str:
    """Returns the time of exportkit's call including Python's launches."""
    return _time_text(row.ours.call)


def _our_text(full: bool, row: Row) -> str:
    name = row.ours.name
    return _time_text(row.time(name), spread=full) + (_error_text(name, row) if full else "")


def _other_text(name: str, full: bool, row: Row) -> str:
    """Returns a time, marked if it includes Python's launches (it could not be captured) and exportkit's does not."""
    other = row.get(name)
    launches = row.ours.kernels and other and other.call and not other.kernels
    return _time_text(row.time(name)) + (" (call)" if launches else "") + (_error_text(name, row) if full else "")


def number(value: float | None) -> str:
    """Formats a number with three significant digits, without an exponent."""
    if value is None:
        return ""
    for digits, least in ((0, 100), (1, 10), (2, 1), (3, 0.1), (4, 0.01)):
        if value >= least:
            return f"{value:.{digits}f}"
    return f"{value:.5f}"


def _ratio_text(row: Row) -> str:
    """Returns such as `4.2x (compile)`: the fastest alternative's time divided by exportkit's."""
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
