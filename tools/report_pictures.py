"""Takes the pictures of docs/reports.md from a report.

    exportkit export arr-coc --format program -o arr_coc_program.pt2
    exportkit bench arr_coc_program.pt2 --device cpu --profile profile.json
    exportkit inspect arr_coc.pt2 --report report.html --program arr_coc_program.pt2 --profile profile.json
    python -m tools.report_pictures report.html -o docs/

Chromium must be installed.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_WIDTH, _HEIGHT = 1280, 900
_COLOURS = 128  # a third of the bytes, and no visible difference


def _open(browser: Browser, report: Path, scheme: Any) -> Page:
    page = browser.new_context(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme=scheme).new_page()
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("#origin")
    return page


def _graph(browser: Browser, report: Path) -> bytes:
    """The graph, with what is said about its first custom operator."""
    page = _open(browser, report, "light")
    page.locator(".graph .box.custom").first.click()
    return page.locator("#graph").screenshot()


def _cases(browser: Browser, report: Path) -> bytes:
    """The recorded cases, with the errors of each output."""
    return _open(browser, report, "dark").locator("#cases").screenshot()


def _write(screenshot: bytes, path: Path) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Takes both pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="the page that `exportkit inspect --report` wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"), help="the folder for the pictures")
    asked = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        _write(_graph(browser, asked.report), asked.output / "report-graph.png")
        _write(_cases(browser, asked.report), asked.output / "report-cases.png")
        browser.close()


if __name__ == "__main__":
    main()
