"""Draws the times of a benchmark, as one SVG: a group of bars for each row, as long as the row's slowest is slow."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from exportkit.bench.tables import number, title
from exportkit.cli.output import printable

if TYPE_CHECKING:
    from exportkit.bench.results import Results, Row

_STYLE = """
svg { font: 13px system-ui, sans-serif; background: Canvas; color-scheme: light dark; }
text { fill: CanvasText; }
.ours { fill: #1f6feb; }
.other { fill: GrayText; fill-opacity: 0.5; }
.limit { stroke: #c4432b; stroke-width: 2; }
"""
_LEFT, _BARS, _WIDTH, _BAR = 150, 480, 760, 20


def bench_plot(results: Results) -> str:
    """Returns the picture. A line shows the time to move the row's bytes at the rate of a copy, where that is known."""
    parts: list[str] = []
    y = 10
    for row in results.rows:
        y = _group(row, y, parts)
    words = f"Milliseconds of a call on {results.machine.device}; line: its bytes at {results.copy_gb_s:.0f} GB/s"
    parts.append(f'<text x="10" y="{y + 14}">{escape(printable(words))}</text>')
    size = f'viewBox="0 0 {_WIDTH} {y + 24}" width="{_WIDTH}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{"".join(parts)}</svg>\n'


def _group(row: Row, y: int, parts: list[str]) -> int:
    """Adds a row at a height. Returns the height below it."""
    times = [(each.name, time.median) for each in row.measurements if (time := row.time(each.name))]
    slowest = max([median for _, median in times] + [row.limit or 0.0])
    gradient = " gradient" * (row.direction == "backward")
    heading = f"{row.subject}{gradient}, {row.size}, {row.dtype}"
    parts.append(f'<text x="10" y="{y + 14}" font-weight="600">{escape(printable(heading[:100]))}</text>')
    top = y = y + 22
    for name, median in times:
        width = round(_BARS * median / slowest, 1) if slowest else 0
        kind = "ours" if name == row.measurements[0].name else "other"
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(printable(title(name)[:22]))}</text>'
        )
        parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y + 3}" width="{width}" height="{_BAR - 6}"/>')
        parts.append(f'<text x="{_LEFT + width + 8}" y="{y + 14}">{number(median)}</text>')
        y += _BAR
    if row.limit:
        at = _LEFT + round(_BARS * row.limit / slowest, 1)
        parts.append(f'<line class="limit" x1="{at}" x2="{at}" y1="{top}" y2="{y}"/>')
    return y + 12
