"""Plots results as bars on a logarithmic scale with the limits. Shorter bars are faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exportkit.bench.results import OURS, Results, Row
from exportkit.bench.tables import number, title

# Okabe and Ito's colours, which colour-blind people can distinguish.
_COLOURS = {OURS: "#0072B2", "eager": "#BBBBBB", "compile": "#E69F00", "library": "#56B4E9"}
_MORE_COLOURS = ("#CC79A7", "#F0E442", "#009E73")


def draw(results: Results, path: Path, rows: Sequence[Row] | None = None) -> None:
    """Writes an .svg or .png.

    Args:
        results: The results, which have the machine's name.
        path: The file to write.
        rows: The rows to draw, such as the largest size of every operator. None: all rows of `results`.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    rows = [row for row in (results.rows if rows is None else rows) if row.time(OURS)]
    names = list(dict.fromkeys(m.name for row in rows for m in row.measurements))
    spare = iter(_MORE_COLOURS * len(names))
    colours = {name: _COLOURS.get(name) or next(spare) for name in names}
    with matplotlib.rc_context({"svg.hashsalt": "exportkit", "font.family": "DejaVu Sans", "svg.fonttype": "none"}):
        height = sum(len(_bars(row)) + 1 for row in rows) * 0.17 + 1.3
        figure = Figure(figsize=(10, height), layout="constrained")
        axes: Any = figure.subplots()
        ticks = _draw_rows(axes, rows, colours)
        axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("milliseconds, logarithmic (median; whiskers from the first to the third quartile)")
        axes.grid(axis="x", which="major", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(y=0.01)
        axes.set_title(f"{results.machine.device}, torch {results.machine.torch}", fontsize=10, loc="left")
        handles: list[Any] = [Patch(color=colours[name], label=title(name)) for name in names]
        if any(row.limit for row in rows):
            handles.append(axes.plot([], [], color="black", linewidth=1.6, label="limit: the rate of a copy")[0])
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8)
        # Without a date, so that equal results give equal files.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(row: Row) -> list[str]:
    return [m.name for m in row.measurements if row.time(m.name)]


def _draw_rows(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> list[tuple[float, str]]:
    """Draws a group of bars for each row; returns the places of the labels."""
    least = min(min(row.limit or t.q1, t.q1) for row in rows for name in _bars(row) if (t := row.time(name)))
    ticks, y = [], 0.0
    for row in rows:
        names = _bars(row)
        for i, name in enumerate(names):
            timing = row.time(name)
            assert timing is not None
            whiskers = [[timing.median - timing.q1], [timing.q3 - timing.median]]
            axes.barh(y + i, timing.median, height=0.9, color=colours[name], xerr=whiskers, error_kw={"linewidth": 0.7})
            text = f" {number(timing.median)}" + (
                f", {row.of_limit:.0%} of the limit" if _shows_limit(row, name) else ""
            )
            axes.text(
                timing.q3,
                y + i,
                text,
                va="center",
                fontsize=6.5,
                weight="bold" if name == OURS else "normal",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # over the limit's line
                zorder=5,
            )
        if row.limit is not None:
            axes.plot([row.limit] * 2, [y - 0.5, y + len(names) - 0.5], color="black", linewidth=1.6, zorder=4)
        gradient = " gradient" if row.direction == "backward" else ""
        ticks.append((y + (len(names) - 1) / 2, f"{row.subject}{gradient}\n{row.size}, {row.dtype}"))
        y += len(names) + 1
    axes.set_xlim(left=least * 0.6)
    return ticks


def _shows_limit(row: Row, name: str) -> bool:
    return name == OURS and row.of_limit is not None
