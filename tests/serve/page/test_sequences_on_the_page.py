"""The page shows the sequences of a package, and a visitor can keep one over its methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import exportkit
from tests.runtime import stateful
from tests.serve.page.in_thread import Site, served_packages
from tests.serve.page.sent_requests import Recorder
from tests.serve.page.test_page_in_chromium import CONTRASTS, CUT_OFF
from tests.serve.page.visits import Visit, rows_of, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PUSH = "#/recorder.push/1"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stateful.write(tmp_path_factory.mktemp("page") / "recorder.pt2")


@pytest.fixture
def sent() -> Recorder:
    return Recorder()


@pytest.fixture
def site(package: Path, sent: Recorder) -> Iterator[Site]:
    with served_packages(package, around=sent.around) as site:
        yield site


def run(visited: Visit) -> None:
    visited.page.get_by_role("button", name="Run").click()
    visited.page.wait_for_selector(".result table, .result .problem")
    visited.page.wait_for_selector("button:has-text('Run'):enabled")


def status(visited: Visit) -> str:
    return visited.text("form.any [role=status]")


def facts(visited: Visit) -> dict[str, str]:
    pairs = visited.evaluate("""() => [...document.querySelectorAll("dl.facts > div")]
        .map((one) => [one.children[0].textContent, one.children[1].textContent])""")
    return dict(pairs)


def test_a_visitor_keeps_a_sequence_over_the_methods_of_a_package(
    browser: Browser, site: Site, sent: Recorder, package: Path
):
    with visit(browser, site, PUSH) as visited:
        page = visited.page
        assert status(visited) == "The next run begins a sequence."
        another = page.get_by_role("button", name="Begin another one")
        assert another.is_disabled()
        page.get_by_label("batch 1..8").fill("2")
        run(visited)
        assert status(visited).startswith("Step 2 comes next. The server keeps the state for 60.0 s")
        run(visited)
        page.wait_for_selector("dd:text-is('1 of 1,024')")
        found = facts(visited)
        assert (found["package"], found["state"]) == ("recorder", "232 bytes of 1.07 GB")
        assert "None has ended yet." in visited.text("article")
        page.goto(f"{site.url}#/recorder.peek/1")
        page.wait_for_selector("h2:has-text('recorder.peek')")
        assert status(visited).startswith("Step 3 comes next")
        page.get_by_label("batch 1..8").fill("2")
        page.get_by_label("scale float32").select_option("ones")
        page.get_by_label("this step").select_option("is the last one")
        run(visited)
        assert status(visited) == "The next run begins a sequence."
        assert page.get_by_label("this step").input_value() == ""
        shown = [float(number) for number in rows_of(visited, ".result")[0][1].removeprefix("FP32[2, 4]").split(", ")]
        page.wait_for_selector("[aria-label='Ended sequences'] >> text=end")
        assert rows_of(visited, "[aria-label='Ended sequences']") == [["end", "1", "their last step was answered"]]
        page.goto(f"{site.url}#/recorder.embed/1")
        page.wait_for_selector("h2:has-text('recorder.embed')")
        assert not page.query_selector("[aria-label='Ended sequences'], form.any [role=status]")
    with exportkit.load(package) as model, model.session(batch=2) as session:
        for each in sent.sent[:2]:
            session.push(each["x"])
        expected = session.peek(torch.ones(2, 1)).flatten()
    assert shown == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_sequence_that_is_lost_says_so_and_a_refused_step_keeps_it(browser: Browser, site: Site):
    with visit(browser, site, PUSH) as visited:
        page = visited.page
        visited.expected = ("Failed to load resource: the server responded with a status of",)
        page.get_by_label("batch 1..8").fill("2")
        run(visited)
        page.get_by_label("batch 1..8").fill("3")
        run(visited)
        assert "began with batch=2" in visited.text(".result .problem")
        assert status(visited).startswith("Step 2 comes next")
        page.get_by_label("batch 1..8").fill("2")
        for _ in range(stateful.ROWS):  # its code fails when it is full
            run(visited)
        problem = visited.text(".result .problem")
        assert problem.endswith("The sequence is lost: the next run begins another one.")
        assert status(visited) == "The next run begins a sequence."
        run(visited)
        assert status(visited).startswith("Step 2 comes next")
        page.get_by_role("button", name="Begin another one").click()
        assert status(visited) == "The next run begins a sequence."
        page.wait_for_selector("[aria-label='Ended sequences'] >> text=failed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_fits_a_narrow_screen(browser: Browser, site: Site, scheme: Any):
    with visit(browser, site, PUSH, color_scheme=scheme, viewport={"width": 360, "height": 640}) as visited:
        visited.page.get_by_label("this step").select_option("is the last one")
        run(visited)
        visited.page.wait_for_selector("[aria-label='Ended sequences']")
        visited.page.mouse.move(0, 0)  # not on a button, which has another colour then
        visited.page.wait_for_timeout(1500)  # so that there are lines
        assert visited.evaluate(CUT_OFF) == []
        assert visited.evaluate(CONTRASTS) == []
        assert visited.evaluate("() => document.documentElement.scrollWidth") == 360
