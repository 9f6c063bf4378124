"""The page in a real browser, in front of models that only say what they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from exportkit.package import manifest as m
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.repository import IndexEntry
from exportkit.serve.engine.statistics import REQUEST_SECONDS
from exportkit.serve.page.page_routes import open_paths, page_routes
from exportkit.serve.protocol.inference import InferTiming
from exportkit.serve.serve_options import ServeOptions
from tests.contrast import FUNCTIONS
from tests.serve.page.doubles import Model, Models, manifest, region_call
from tests.serve.page.in_thread import Site, served
from tests.serve.page.visits import visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<img src=x onerror=document.title='taken'>\"'&amp;</script><script>document.title='taken'</script>"
KEY = "a-key-that-is-long-enough"
TIMING = InferTiming(queue=0.0, compute_input=0.0, compute_infer=0.0, compute_output=0.0, batch_rows=1)
BATCHED = Batching(m.Dimension(name="batch", min=1, max=4), max_rows=4)


class AsksForKey:
    """Answers only the page's files to those who have no key, as the server does."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        given = dict(scope["headers"]).get(b"authorization", b"").decode()
        if scope["path"] in open_paths() or given == f"Bearer {KEY}":
            await self.app(scope, receive, send)
        else:
            await JSONResponse({"error": f"no key, said <b>{given}</b>"}, 401)(scope, receive, send)


@pytest.fixture(scope="module")
def models() -> Models:
    hostile = region_call()
    hostile = region_call(
        inputs=(
            m.TensorInput(name=HOSTILE, dtype="float32", shape=hostile.inputs[0].shape, written=None),
            hostile.inputs[1],
        )
    )
    return Models(
        [
            Model(batching=BATCHED),
            Model(name=HOSTILE, version="<b>2</b>", manifest=manifest(hostile), failure=HOSTILE, ready=False),
            Model(name="regions", manifest=manifest(region_call())),
        ],
        [IndexEntry("absent", HOSTILE, "UNAVAILABLE", HOSTILE)],
    )


@pytest.fixture(scope="module")
def site(models: Models) -> Iterator[Site]:
    with served(Starlette(routes=page_routes(models, ServeOptions()))) as site:
        yield site


def test_it_shows_what_a_model_takes_and_gives(browser: Browser, site: Site):
    with visit(browser, site) as visited:
        assert visited.text("h2").split() == ["tiny", "version", "1", "ready"]
        rows = [row.inner_text() for row in visited.page.query_selector_all(".tensors tbody tr")]
        assert rows[0].split("\t") == ["image", "float32[batch, 3, 16*gh, 8] batch 1..4, gh 1..6"]
        assert rows[2].split("\t") == ["offset", "float32[5]"]
        assert rows[3].split("\t") == ["regions.mean", "float32[batch, 3] batch 1..4"]
        assert "up to 4 rows run together, and answers are equal to the last bit" in visited.text(".about")


def test_charts_follow_the_counters_and_rest_in_a_hidden_tab(browser: Browser, site: Site, models: Models):
    counted = models.loaded[0].counted
    with visit(browser, site) as visited:
        for _ in range(40):
            counted.succeeded(TIMING, 0.04)
        counted.executed(3, compute_input=0.0, compute_infer=0.0, compute_output=0.0)
        counted.failed("deadline")
        counted.entered(7, 70)
        visited.page.wait_for_selector("text=1 deadline")
        charts = [chart.get_attribute("aria-label") for chart in visited.page.query_selector_all(".chart svg")]
        # All in the bucket from 25 to 50 ms.
        assert "now p50 37.5 ms, p99 49.8 ms" in charts[0]
        assert "now rows wait 7" in charts[2]
        assert "now rows 3.00" in charts[3]
        asked: list[str] = []
        visited.page.on("request", lambda request: asked.append(request.url))
        hide = "hidden => {Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        hide += " document.dispatchEvent(new Event('visibilitychange'))}"
        visited.evaluate(hide, True)
        visited.page.wait_for_timeout(100)  # an answer may be on its way
        asked.clear()
        visited.page.wait_for_timeout(1500)
        assert asked == []
        with visited.page.expect_request("**/page/status"):
            visited.evaluate(hide, False)
    counted.left(7, 70)


def test_percentiles_are_linear_within_a_bucket(browser: Browser, site: Site):
    script = """async ([bounds, histograms, shares]) => {
        const { percentile } = await import("./page/live.js");
        return histograms.map((counts) => shares.map((share) => percentile(bounds, counts, share)));
    }"""
    chance = np.random.default_rng(0)
    shares = [0.013, 0.211, 0.501, 0.833, 0.903, 0.991]  # none is at the edge of a bucket
    histograms = chance.integers(0, 7, (40, len(REQUEST_SECONDS) + 1)) * chance.integers(0, 2, (40, 1))
    with visit(browser, site) as visited:
        found = visited.evaluate(script, [list(REQUEST_SECONDS), histograms.tolist(), shares])
    edges = [0, *REQUEST_SECONDS, REQUEST_SECONDS[-1]]
    for counts, values in zip(histograms, found):
        ranks = np.array(shares) * counts.sum()
        expected = np.interp(ranks, [0, *counts.cumsum()], edges) if counts.any() else [None] * len(shares)
        assert values == pytest.approx(list(expected))


def test_a_chart_without_values_has_no_scale(browser: Browser, site: Site):
    script = """async (rows) => {
        const { Chart } = await import("./page/chart.js");
        const chart = new Chart("Rows", ["rows"], (value) => `${value} rows`, 1);
        rows.forEach((value) => chart.add([value]));
        return chart.scale.textContent;
    }"""
    with visit(browser, site) as visited:
        assert [visited.evaluate(script, rows) for rows in ([], [None, 0, 0], [0, 3])] == ["", "", "3 rows"]


def test_lines_are_interrupted_where_nobody_looked_and_begin_again_with_the_server(browser: Browser, site: Site):
    with visit(browser, site) as visited:
        script = """async ([times, counts]) => {
            const { Live } = await import("./page/live.js");
            const live = new Live([1, 2]);
            const counters = (rows) => ({
                requests: rows, rows, executions: rows, failures: {}, seconds: [rows, 0, 0], queued_rows: 0,
                mean_batch: 1, busy_runners: 0, runners: 1, load_seconds: 1,
            });
            times.forEach((time, index) => live.add(time, counters(counts[index])));
            return ["throughput", "queue"].map((name) => live.charts[name].lines[0].values);
        }"""
        throughput, queue = visited.evaluate(script, [[1, 2, 3, 60, 61, 62, 63], [0, 10, 20, 590, 600, 0, 7]])
        assert throughput == [10, 10, None, 10, 10, 7]
        assert queue == [0, 0, 0, None, 0, 0, 0, 0]
        throughput, queue = visited.evaluate(script, [list(range(100)), list(range(100))])
        assert len(throughput) == len(queue) == 60


def test_no_text_of_a_server_becomes_html(browser: Browser, site: Site):
    with visit(browser, site) as visited:
        link = visited.page.get_by_role("link", name=HOSTILE)
        link.click()
        visited.page.wait_for_selector(".regions")
        assert HOSTILE in visited.text("h2")
        assert HOSTILE in visited.text(".about")
        assert HOSTILE in visited.text(".absent")
        assert HOSTILE in visited.text(".tensors")
        visited.page.wait_for_timeout(50)
        assert visited.page.title().startswith(HOSTILE)
        assert visited.page.query_selector_all("main img, nav img, article script, h2 b") == []


def test_keys_reach_everything_and_the_focus_is_seen(browser: Browser, site: Site):
    with visit(browser, site, "#/regions/1") as visited:
        visited.evaluate("document.querySelector('details').open = true")
        wanted = visited.evaluate(
            """() => [...document.querySelectorAll("a, button, input, select, summary, [tabindex='0']")]
                .filter((one) => one.checkVisibility({visibilityProperty: true}))
                .filter((one) => one.type !== "radio" || one.checked).length"""
        )
        seen = []
        for _ in range(wanted):
            visited.page.keyboard.press("Tab")
            seen.append(
                visited.evaluate(
                    """() => {
                        const one = document.activeElement;
                        const shown = one.type === "radio" ? one.nextSibling : one;
                        const style = getComputedStyle(shown);
                        const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
                        one.dataset.seen = true;
                        return [one.outerHTML.slice(0, 80), outlined];
                    }"""
                )
            )
        assert [text for text, outlined in seen if not outlined] == []
        assert len(visited.page.query_selector_all("[data-seen]")) == wanted


def test_arrow_keys_go_from_patch_to_patch(browser: Browser, site: Site):
    with visit(browser, site, "#/regions/1") as visited:
        visited.page.focus(".stage svg")
        for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft"):
            visited.page.keyboard.press(key)
        assert visited.text(".readout") == "Row 3, column 1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(browser: Browser, site: Site, scheme: str):
    with visit(browser, site, "#/regions/1", color_scheme=scheme, reduced_motion="reduce") as visited:
        assert visited.evaluate(CONTRASTS) == []


def test_nothing_moves_for_those_who_want_less_motion(browser: Browser, site: Site):
    script = """() => [...document.querySelectorAll("*")].map((one) => getComputedStyle(one))
        .filter((style) => style.transitionDuration !== "0s" || style.animationName !== "none").length"""
    moving = []
    for wish in ("reduce", "no-preference"):
        with visit(browser, site, "#/regions/1", reduced_motion=wish) as visited:
            moving.append(visited.evaluate(script))
    assert moving[0] == 0 < moving[1]


def test_the_theme_can_be_chosen_and_is_remembered(browser: Browser, site: Site):
    ground = "() => getComputedStyle(document.body).backgroundColor"
    with visit(browser, site, color_scheme="dark", reduced_motion="reduce") as visited:
        dark = visited.evaluate(ground)
        button = visited.page.get_by_role("button", name="Theme")
        button.press("Enter")
        light = visited.evaluate(ground)
        assert light != dark
        visited.page.reload()
        visited.page.wait_for_selector("article")
        assert visited.evaluate(ground) == light
        button.press("Enter")
        assert (visited.evaluate(ground), button.inner_text()) == (dark, "Theme: dark")


@pytest.mark.parametrize("place", ["#/regions/1", "#/tiny/1"])
def test_a_narrow_screen_scrolls_in_one_direction_only(browser: Browser, site: Site, place: str):
    with visit(browser, site, place, viewport={"width": 360, "height": 640}) as visited:
        assert visited.evaluate("() => document.documentElement.scrollWidth") == 360
        assert visited.evaluate(CUT_OFF) == []


def test_everything_that_is_used_has_a_name(browser: Browser, site: Site):
    with visit(browser, site, "#/regions/1") as visited:
        page = visited.page
        visited.evaluate("document.querySelector('details').open = true")
        for role in ("link", "button", "combobox", "spinbutton", "radio", "application", "img", "table", "navigation"):
            snapshots = [each.aria_snapshot().splitlines()[0] for each in page.get_by_role(role).all()]
            assert snapshots, role
            assert [text for text in snapshots if '"' not in text] == [], role
        ids = visited.evaluate("() => [...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))
        levels = visited.evaluate(
            "() => [...document.querySelectorAll('h1,h2,h3,h4')].map((one) => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        assert page.get_by_role("main").count() == page.get_by_role("navigation").count() == 1
        assert visited.evaluate("() => document.documentElement.lang") == "en"


def test_a_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser, models: Models):
    application = Starlette(routes=page_routes(models, ServeOptions()), middleware=[Middleware(AsksForKey)])
    with served(application) as site, visit(browser, site) as visited:
        visited.expected = ("Failed to load resource: the server responded with a status of 401",)
        page = visited.page
        assert visited.text("#key-problem") == ""
        assert visited.evaluate("() => document.activeElement.id") == "key-field"
        page.keyboard.type("ключ")  # no header can have it
        page.keyboard.press("Enter")
        assert page.is_visible("#key")
        page.fill("#key-field", "")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=no key, said <b>Bearer wrong</b>")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("article")
        assert not page.is_visible("#key")
        page.reload()
        page.wait_for_selector("article")
        assert KEY not in str(page.context.storage_state())  # cookies and local storage
        other = page.context.new_page()
        other.goto(site.url)
        other.wait_for_selector("#key:not([hidden])")


def test_models_come_and_go_and_are_replaced(browser: Browser):
    models = Models([Model(), Model(name="other")])
    with served(Starlette(routes=page_routes(models, ServeOptions()))) as site, visit(browser, site) as visited:
        page = visited.page
        page.get_by_role("link", name="other").press("Enter")
        page.wait_for_selector("h2:has-text('other')")
        page.wait_for_timeout(1500)
        assert page.evaluate("() => document.activeElement.id") == "model"
        models.loaded = [Model(), Model(name="other", manifest=manifest(region_call()))]
        page.wait_for_selector(".regions")
        page.get_by_role("link", name="tiny").focus()
        models.loaded = [Model(name="first"), *models.loaded]
        page.wait_for_selector("nav a:has-text('first')")
        assert page.evaluate("() => document.activeElement.innerText").startswith("tiny")
        assert visited.text("h2").startswith("other")
        models.loaded, models.draining, models.ready = [Model()], True, False
        page.wait_for_selector("h2:has-text('tiny')")
        assert (visited.text("#server"), len(page.query_selector_all("nav a"))) == ("Draining", 1)
        models.loaded = []
        page.wait_for_selector(".empty")


def test_it_says_that_the_server_is_gone_and_goes_on_when_it_is_back(browser: Browser, site: Site):
    with visit(browser, site) as visited:
        visited.expected = ("Failed to load resource: net::",)
        visited.page.context.set_offline(True)
        visited.page.wait_for_selector("#server:has-text('No connection')")
        assert visited.page.is_visible("article")
        visited.page.context.set_offline(False)
        visited.page.wait_for_selector("#server:has-text('Ready')")


def test_it_says_that_the_server_does_not_answer(browser: Browser, site: Site):
    with visit(browser, site) as visited:
        visited.page.clock.install()
        visited.page.route("**/page/status", lambda route: None)
        with visited.page.expect_request("**/page/status"):
            pass
        assert visited.text("#server") == "Ready"
        visited.page.clock.run_for(10_000)
        visited.page.wait_for_selector("#server:has-text('No connection')")


def test_a_server_without_models_says_so(browser: Browser):
    with served(Starlette(routes=page_routes(Models([]), ServeOptions()))) as site, visit(browser, site) as visited:
        assert visited.text("main") == "This server has loaded no model."


# Texts whose contrast with what is behind them is below WCAG 2.2's AA, and lines of charts and fields below 3.
CONTRASTS = (
    f"""() => {{{FUNCTIONS}"""
    + """
    const bad = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const style = getComputedStyle(element);
        if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
        const found = contrast(channels(style.color), behind(element));
        if (found < 4.5) bad.push([walker.currentNode.data, found]);
    }
    for (const line of document.querySelectorAll(".line")) {
        const found = contrast(channels(getComputedStyle(line).stroke), behind(line.closest(".card")));
        if (found < 3) bad.push(["line", found]);
    }
    for (const field of document.querySelectorAll("input:not([type=radio]), select, button:not(.primary)")) {
        const found = contrast(channels(getComputedStyle(field).borderTopColor), behind(field.parentElement));
        if (found < 3) bad.push([field.outerHTML, found]);
    }
    return bad;
}"""
)

# Elements that reach beyond the screen, and fields whose text does.
CUT_OFF = """() => [...document.querySelectorAll("body *")]
    .filter((one) => one.checkVisibility() && !one.closest(".skip, .scroll"))
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
    .map((one) => one.outerHTML.slice(0, 100))"""
