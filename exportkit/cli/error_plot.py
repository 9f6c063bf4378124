"""Draws how far outputs are from their reference, as one SVG: a row for each output, errors on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from exportkit.cli.output import printable

STYLE = """
figure { margin: 1.5em 0; }
svg { width: 100%; max-width: 60em; font: 13px system-ui, sans-serif; }
svg text { fill: CanvasText; }
.grid { stroke: GrayText; stroke-opacity: 0.35; }
.eager { fill: none; stroke: GrayText; stroke-width: 1.5; }
.package { fill: #1f6feb; fill-opacity: 0.55; }
.allowed { stroke: #c4432b; stroke-width: 2; }
"""

Errors = Mapping[str, Sequence[float]]
"""The root mean square errors of an output by whose they are: `eager`, `package`, and `allowed`, which are limits."""

_LEFT, _WIDTH, _ROW, _TOP = 200, 760, 26, 30
_MOST = 24  # outputs
_SMALLEST = 1e-9  # what is closer is drawn here


def error_plot(outputs: Mapping[str, Errors], sizes: str = "") -> str:
    """Returns the figure, or nothing if no output has an error.

    The errors are relative to the reference's magnitude. `sizes` says which were tried.
    """
    rows = {name: errors for name, errors in outputs.items() if any(errors.values())}
    values = [value for errors in rows.values() for each in errors.values() for value in each if math.isfinite(value)]
    if not values:
        return ""
    shown = list(rows.items())[:_MOST]
    low, high = (math.floor(_log(min(values))), math.ceil(_log(max(values)) + 0.01))

    def x(value: float) -> float:
        at = (min(_log(value), high) - low) / (high - low)
        return round(_LEFT + at * (_WIDTH - _LEFT - 20), 1)

    parts = []
    bottom = _TOP + _ROW * len(shown)
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP - 8}" y2="{bottom}"/>')
        parts.append(f'<text x="{at}" y="{_TOP - 14}" text-anchor="middle">1e{power}</text>')
    for number, (name, errors) in enumerate(shown):
        y = _TOP + _ROW * number + _ROW // 2
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(printable(name[-28:]))}</text>')
        parts += [f'<circle class="eager" cx="{x(each)}" cy="{y}" r="6"/>' for each in errors.get("eager", ())]
        parts += [f'<circle class="package" cx="{x(each)}" cy="{y}" r="4"/>' for each in errors.get("package", ())]
        if limits := errors.get("allowed", ()):
            at = x(max(limits))
            parts.append(f'<line class="allowed" x1="{at}" x2="{at}" y1="{y - 9}" y2="{y + 9}"/>')
    drawn = f'<svg viewBox="0 0 {_WIDTH} {bottom + 6}" role="img" aria-label="Errors by output">{"".join(parts)}</svg>'
    code = "the package (dots), " if any(errors.get("package") for errors in rows.values()) else ""
    limit = ", the greatest error allowed (bars)" if any(errors.get("allowed") for errors in rows.values()) else ""
    words = f"Root mean square error of each output, relative to its magnitude: {code}eager (circles){limit}. {sizes}"
    more = f" {len(rows) - len(shown)} outputs are not shown." if len(rows) > len(shown) else ""
    return f"<figure>{drawn}<figcaption>{escape(printable(words + more))}</figcaption></figure>"


def _log(value: float) -> float:
    return math.log10(max(value, _SMALLEST))
