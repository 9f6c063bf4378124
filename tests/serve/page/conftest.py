"""One browser for the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Tests run where there is no sandbox of users, and ask nothing of other hosts.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, without a window. Each test opens a context of its own in it.

    A module's, not the session's: playwright keeps an event loop in this thread, and other tests begin theirs.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        needed = os.environ.get("EXPORTKIT_REQUIRE_CHROMIUM") == "1"
        (pytest.fail if needed else pytest.skip)(f"there is no {' and no '.join(NAMES)}: apt-get install chromium")
    with (
        playwright.sync_playwright() as driver,
        driver.chromium.launch(executable_path=executable, args=FLAGS) as browser,
    ):
        yield browser
