"""A visit of the page, which notices what no visitor should cause: errors, and requests to other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.serve.page.in_thread import Site

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SECONDS = 60_000  # ms that a slow machine may take


@dataclass
class Visit:
    page: Page
    trouble: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()  # what Chromium writes to its console because of the test

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)


@contextmanager
def visit(browser: Browser, site: Site, place: str = "", **context: Any) -> Iterator[Visit]:
    """Opens a site at a place, such as `#/tiny/1`, as a visitor of playwright's `new_context`, and waits for a model.

    At the end nothing bad may have happened.
    """
    with browser.new_context(**context) as opened:
        opened.set_default_timeout(SECONDS)
        page = opened.new_page()
        visited = Visit(page)
        own = (site.url, "blob:", "data:")
        page.on("pageerror", lambda error: visited.trouble.append(str(error)))
        page.on("console", lambda message: visited.trouble.append(message.text))
        page.on("request", lambda asked: asked.url.startswith(own) or visited.trouble.append(asked.url))
        page.goto(f"{site.url}{place}")
        page.wait_for_selector("article, .empty, #key:not([hidden])")
        page.wait_for_selector(".loading", state="detached")  # a part of the page
        yield visited
        assert [text for text in visited.trouble if not text.startswith(visited.expected or "\0")] == []
