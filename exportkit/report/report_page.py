"""Writes a report: one HTML file that needs nothing else, asks for nothing, and runs only the script it came with."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from exportkit import web
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import write_whole
from exportkit.report.case_numbers import case_numbers
from exportkit.report.package_data import Words, compiled_calls, package_data
from exportkit.report.untrusted import LeftOut, PageLimits, plain_text, script_json
from exportkit.report.verification import read_verification

_STATIC = Path(__file__).with_name("static")
_STYLES = (web.STATIC / "page.css", _STATIC / "report.css")
# Each after those that it imports from.
_SCRIPTS = (
    web.STATIC / "dom.js",
    web.STATIC / "theme.js",
    *(_STATIC / f"{name}.js" for name in ("text", "charts", "sections", "report")),
)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "(?:[^"]*/)?(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (function\*?|class|const) (\w+)", re.MULTILINE)


def write_report(
    reader: PackageReader, words: Words, verification: Path | None, out: Path, limits: PageLimits = PageLimits()
) -> int:
    """Writes the page about an open package whose digests were checked.

    Args:
        reader: The package.
        words: The manifest in words.
        verification: What `exportkit verify --json` printed, if there is such a file.
        out: The file to write. An existing file is replaced when the page is complete.
        limits: How much the page has room for.

    Returns:
        The size of the page in bytes.

    Raises:
        UsageError: `verification` is not what it should be, or belongs to another artifact.
        OSError: The page cannot be written.
    """
    page = page_of(report_data(reader, words, verification, limits)).encode()
    write_whole(out, page)
    return len(page)


def report_data(
    reader: PackageReader, words: Words, verification: Path | None, limits: PageLimits = PageLimits()
) -> dict[str, Any]:
    """Returns what the page shows. Arguments and errors are those of `write_report`."""
    left_out = LeftOut(limits)
    data = package_data(reader, words, left_out)
    data["numbers"] = case_numbers(reader, left_out)
    data["compiled_calls"] = compiled_calls(reader, left_out)
    if verification is not None:
        data["verification"] = read_verification(verification, reader, left_out)
    data["left_out"] = left_out.notes
    return data


def page_of(data: Mapping[str, Any]) -> str:
    """Returns the page, given what it shows."""
    style = "\n".join(path.read_text() for path in _STYLES)
    script = "\n".join(_as_expression(path) for path in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = {
        "policy": policy,
        "title": escape(plain_text(f"{data['name']} {data['version']}", 200)),
        "style": style,
        "data": script_json(data),
        "script": script,
    }
    template = (_STATIC / "report.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _as_expression(path: Path) -> str:
    """Returns a module as an object with what it exports, because a page that is one file cannot import others."""
    text = _IMPORT.sub(r"const \1 = in_\2;", path.read_text())
    exported = ", ".join(name for _, name in _EXPORT.findall(text))
    text = _EXPORT.sub(r"\1 \2", text)
    return f"const in_{path.stem} = (() => {{\n{text}return {{ {exported} }};\n}})();"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
