"""Writes what is known of an artifact as one HTML file: a picture of errors, tables of text, and no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import click

from exportkit.cli import error_plot
from exportkit.cli.output import printable
from exportkit.inspect.sections import Section, details, sections
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable, write_whole
from exportkit.package.case_files import recorded_errors

_MOST_ROWS, _LONGEST = 1000, 1000  # of a table, and characters of a text

_STYLE = (
    """
:root { color-scheme: light dark; }
body { max-width: 75em; margin: 2em auto; padding: 0 1em; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6em; }
h2 { margin: 2em 0 0.3em; font-size: 1.1em; }
table { border-collapse: collapse; }
td { padding: 0.2em 1.5em 0.2em 0; vertical-align: top; border-top: 1px solid GrayText; overflow-wrap: break-word; }
"""
    + error_plot.STYLE
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; \
form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{picture}
{tables}
</body>
</html>
"""


def check_page(path: Path, artifact: Path) -> None:
    """Refuses a page that could not be written, before the work on it."""
    if path.suffix != ".html":
        raise click.UsageError(f"--report {path}: give a file that ends in .html.")
    check_writable(path, read=[artifact])


def write_page(
    path: Path,
    reader: PackageReader,
    more: Sequence[Section] = (),
    verified: Mapping[str, error_plot.Errors] | None = None,
    sizes: str = "",
) -> None:
    """Writes the page of an open artifact whose digests were checked.

    Nothing that the artifact says is more than text on the page. Further sections stand first. `verified` has the
    errors that `verify` found, by output, and `sizes` says which it tried.
    """
    methods = reader.manifest.methods
    eager = {
        name if len(methods) == 1 else f"{method.name}: {name}": [each.rms for each in errors]
        for method in methods
        for name, errors in recorded_errors(reader.manifest.cases, method.name).items()
    }
    found = verified or {}
    errors = {name: {"eager": eager.get(name, ()), **found.get(name, {})} for name in {**eager, **found}}
    first, *others = sections(reader)
    below = (*more, *others, *details(reader))
    tables = [_table(first), *(f"<h2>{_text(each.title)}</h2>\n{_table(each)}" for each in below)]
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    page = _PAGE.format(
        digest=digest,
        title=_text(first.title),
        style=_STYLE,
        picture=error_plot.error_plot(errors, sizes),
        tables="\n".join(tables),
    )
    write_whole(path, page.encode())


def _table(section: Section) -> str:
    columns = max(map(len, section.rows))
    rows = [_row(row, columns) for row in section.rows[:_MOST_ROWS]]
    if more := len(section.rows) - len(rows):
        rows.append(_row([f"and {more:,} more"], columns))
    return "<table>\n{}\n</table>".format("\n".join(rows))


def _row(row: Sequence[str], columns: int) -> str:
    """Returns a row, whose only cell is as wide as the table."""
    span = f' colspan="{columns}"' if len(row) == 1 else ""
    return f"<tr>{''.join(f'<td{span}>{_text(cell)}</td>' for cell in row)}</tr>"


def _text(text: str) -> str:
    return escape(printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"))
