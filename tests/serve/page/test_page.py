"""The page in a real browser, what its URLs answer, and the parts that installed packages bring."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import pytest
import torch
from msgspec.structs import replace
from starlette.applications import Starlette

import exportkit
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.operations.api_keys import ApiKeys, RequireKey
from exportkit.serve.page import page_routes as module
from exportkit.serve.page.page_routes import open_paths, page_parts, page_routes
from exportkit.serve.protocol.inference import InferTiming
from tests.arr_coc.page.calls import region_call
from tests.runtime import tiny
from tests.serve.page.doubles import Model, Models
from tests.serve.page.in_thread import Site, served, served_packages
from tests.serve.page.sent_requests import DTYPES, Recorder
from tests.serve.page.visits import Visit, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<img src=x onerror=document.title='taken'>\"'&amp;</script><script>document.title='taken'</script>"
KEY = "a-key-that-is-long-enough"


@pytest.fixture
def models() -> Models:
    hostile = replace(tiny.call(), inputs=tuple(replace(each, name=HOSTILE + each.name) for each in tiny.call().inputs))
    return Models([Model(), Model(name=HOSTILE, version="<b>2</b>", call=hostile, failure=HOSTILE, ready=False)])


@pytest.fixture
def site(models: Models) -> Iterator[Site]:
    with served(Starlette(routes=page_routes(models))) as site:
        yield site


def run(visited: Visit) -> str:
    """Runs what is chosen. Returns what is said about it."""
    visited.page.get_by_role("button", name="Run").click()
    visited.page.wait_for_selector(".any [role=status]:not(:empty)")
    visited.page.wait_for_selector("button:has-text('Run'):enabled")
    return visited.text(".any [role=status]")


def outputs(visited: Visit) -> list[list[float]]:
    """Returns the numbers that are shown of each output."""
    shown = [row.inner_text().partition("] ")[2] for row in visited.page.query_selector_all(".any code")]
    return [[float(number) for number in text.removesuffix(", …").split(", ")] for text in shown]


def test_every_answer_forbids_what_the_page_does_not_need(site: Site):
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    wanted = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-store"}
    for path in [*open_paths(), "/page/status"]:
        answer = site.get(path)
        assert answer.status == 200
        assert answer.headers.items() >= wanted.items(), path
    assert site.get("/page/status", method="POST").status == 405


def test_the_page_names_each_of_its_files_and_no_other_place(site: Site):
    pending = {"/", *(f"/page/parts/{name}/part{kind}" for name in page_parts() for kind in (".js", ".css"))}
    seen = set()
    while pending:
        seen.add(path := pending.pop())
        text = site.get(path).text
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, path
        names = re.findall(r'(?:from "(?=\.)|new URL\("|(?:src|href)="(?=page))([^"]+)"', text)
        pending |= {urljoin(path, name) for name in names} - seen
    assert seen == open_paths()
    for path in ("/page/", "/page/../page_routes.py", "/page/%2e%2e/page_routes.py"):
        assert site.get(path).status == 404


def test_it_shows_what_a_model_takes_and_its_figures_move(browser: Browser, site: Site, models: Models):
    counted = models.loaded[0].counted
    with visit(browser, site) as visited:
        assert visited.text("h2").split() == ["tiny", "version", "1", "ready"]
        assert visited.text(".about") == "On cpu. Up to 4 rows run together."
        fields = [label.inner_text().splitlines()[:2] for label in visited.page.query_selector_all(".any label")]
        assert fields[:3] == [["batch", "1..4"], ["gh", "1..6"], ["image", "float32[batch, 3, 16*gh, 8]"]]
        assert visited.text(".any table").splitlines()[0] == "regions.mean\tfloat32[batch, 3]"
        for _ in range(40):
            counted.succeeded(InferTiming(0.01, 0.0, 0.0, 0.0, batch_rows=1), 0.04)
        counted.executed(3, compute_input=0.0, compute_infer=0.0, compute_output=0.0)
        counted.failed("deadline")
        counted.entered(7, 70)
        visited.page.wait_for_selector("text=40 answered, 1 deadline")
        rate, *others = [tile.inner_text() for tile in visited.page.query_selector_all(".figure b")]
        assert 0 < float(rate) < 100
        assert others == ["40.0 ms", "10.0 ms", "3.00", "7"]
        visited.page.wait_for_selector(".line[d*=L]", state="attached")


def test_no_text_of_a_server_becomes_html(browser: Browser, site: Site):
    with visit(browser, site) as visited:
        visited.page.get_by_role("link", name=HOSTILE).press("Enter")
        visited.page.wait_for_selector("h2:has-text('onerror')")
        assert visited.evaluate("() => document.activeElement.id") == "model"
        for place in ("h2", "article > .problem", ".any", "nav"):
            assert HOSTILE in visited.text(place)
        visited.page.wait_for_timeout(50)
        assert visited.page.title() == "exportkit serve"
        assert visited.page.query_selector_all("main img, nav img, article script, h2 b") == []


def test_any_model_can_be_tried(browser: Browser, tiny_package: Path):
    recorder = Recorder()
    with served_packages(tiny_package, around=recorder.around) as site, visit(browser, site) as visited:
        visited.page.get_by_label("batch 1..4").fill("3")
        visited.page.get_by_label("gh 1..6").fill("2")
        visited.page.get_by_label("query.features float32").select_option("ones")
        visited.page.get_by_label("offset float32").select_option("zeros")
        assert run(visited).startswith("Answered in ")
        (sent,) = recorder.sent
        assert sent["image"].shape == (3, 3, 32, 8)
        assert 0.8 < float(sent["image"].std()) < 1.2
        assert torch.equal(sent["query.features"], torch.ones(3, 5))
        assert torch.equal(sent["offset"], torch.zeros(5))
        with exportkit.load(tiny_package) as model:
            query = {"features": sent["query.features"], "mode": "scaled"}
            answer = model(sent["image"], query, offset=sent["offset"])
        for shown, tensor in zip(outputs(visited), [*answer["regions"], answer["rest"][0]], strict=True):
            assert shown == pytest.approx(tensor.flatten()[:8].tolist(), rel=1e-5)


def test_ones_own_values_are_sent_and_curl_sends_the_same(browser: Browser, recorder_package: Path):
    recorder = Recorder()
    with (
        served_packages(recorder_package, around=recorder.around) as site,
        visit(browser, site, "#/recorder.push/1") as visited,
    ):
        name = visited.page.query_selector_all(".any label b")[-2].inner_text()
        visited.page.get_by_label(name, exact=False).first.select_option("own values")
        values = visited.page.get_by_label(f"values of {name}")
        values.fill("1, x")
        assert run(visited) == "x is no number"
        values.fill("1")
        assert "values, and 1 are given" in run(visited)
        length = int(run(visited).split(" takes ")[1].split()[0])
        values.fill(str([[0.5 * number for number in range(length)]]))
        assert run(visited).startswith("Answered in ")
        assert recorder.sent[-1][name].flatten().tolist() == [0.5 * number for number in range(length)]
        command = visited.page.get_by_label("The same with curl").text_content()
        assert command.startswith(f"curl -s {site.url}")
        answer = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True, timeout=60)
        assert "outputs" in json.loads(answer.stdout)
        assert recorder.sent[-1][name].equal(recorder.sent[-2][name])


def test_a_sequence_goes_over_the_methods_of_a_package_and_a_refusal_is_shown(browser: Browser, recorder_package: Path):
    recorder = Recorder()
    with (
        served_packages(recorder_package, around=recorder.around) as site,
        visit(browser, site, "#/recorder.push/1") as visited,
    ):
        visited.expected = ("Failed to load resource: the server responded with a status of 409",)
        visited.page.get_by_label("sequence").select_option("continue")
        assert "has no sequence" in run(visited)
        assert visited.page.query_selector(".any .problem")
        visited.page.get_by_label("sequence").select_option("start")
        for _ in range(2):
            assert run(visited).startswith("Answered in ")
        visited.page.goto(f"{site.url}#/recorder.peek/1")
        visited.page.wait_for_selector("h2:has-text('recorder.peek')")
        visited.page.get_by_label("sequence").select_option("end")
        run(visited)
        assert visited.page.get_by_label("sequence").input_value() == "start"
        steps = [(each["sequence_start"], each["sequence_end"]) for each in recorder.parameters]
        assert steps == [(False, False), (True, False), (False, False), (False, True)]
        with exportkit.load(recorder_package) as model, model.session(batch=1) as session:
            session.push(recorder.sent[1]["x"])
            session.push(recorder.sent[2]["x"])
            expected = session.peek(recorder.sent[3]["scale"]).flatten()
        assert outputs(visited)[0] == pytest.approx(expected.tolist(), rel=1e-5)


def test_every_datatype_is_written_and_read_as_torch_does(browser: Browser, site: Site):
    script = """async (text) => {
        const { decode, encode } = await import("./page/tensors.js");
        const [datatype, numbers, raw] = JSON.parse(text);
        const said = (one) => (Object.is(one, -0) ? "-0" : String(one));
        const read = Array.from(decode(datatype, Uint8Array.from(raw)), said);
        return JSON.stringify([Array.from(encode(datatype, Float64Array.from(numbers))), read]);
    }"""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    ties = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 1 + 2.0**-11])
    floats = torch.cat([torch.randn(3000) * torch.exp(8 * torch.randn(3000)), ties])
    with visit(browser, site) as visited:
        for datatype, dtype in DTYPES.items():
            numbers = floats if dtype.is_floating_point else torch.tensor([0.0, 1.0])
            stored = halves.view(dtype) if dtype.itemsize == 2 else numbers.to(dtype)
            raw = stored.view(torch.uint8).tolist()
            written, said = json.loads(visited.evaluate(script, json.dumps([datatype, numbers.tolist(), raw])))
            assert written == numbers.to(dtype).view(torch.uint8).tolist(), datatype
            read = torch.tensor([float(text) for text in said], dtype=torch.float64)
            assert torch.equal(read.nan_to_num(nan=7e77), stored.double().nan_to_num(nan=7e77)), datatype


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_both_themes_and_on_a_narrow_screen(browser: Browser, site: Site, scheme: str):
    size = {"width": 360, "height": 640}
    with visit(browser, site, color_scheme=scheme, viewport=size, reduced_motion="reduce") as visited:
        visited.page.wait_for_selector(".line[d*=L]", state="attached")
        assert visited.evaluate("() => document.documentElement.scrollWidth") == 360
        for role in ("link", "button", "combobox", "spinbutton", "table", "navigation"):
            names = [each.aria_snapshot().splitlines()[0] for each in visited.page.get_by_role(role).all()]
            assert names, role
            assert [text for text in names if '"' not in text] == [], role


def test_a_key_is_asked_for_and_forgotten_with_the_page(browser: Browser, models: Models, tmp_path: Path):
    keys = tmp_path / "keys.txt"
    keys.write_text(KEY)
    keys.chmod(0o600)
    guarded = partial(RequireKey, keys=ApiKeys(keys), open_paths=open_paths())
    application = make_app(models, HttpOptions(), routes=page_routes(models), middleware=[guarded])
    with served(application) as site, visit(browser, site) as visited:
        visited.expected = ("Failed to load resource: the server responded with a status of 401",)
        page = visited.page
        for key, shown in (
            ("ключ", "#key:not([hidden])"),  # no header can have it
            ("wrong", "text=the request has no valid API key"),
            (KEY, "article"),
        ):
            page.fill("#key-field", key)
            page.keyboard.press("Enter")
            page.wait_for_selector(shown)
        assert not page.is_visible("#key")
        page.reload()
        page.wait_for_selector("#key:not([hidden])")


def test_models_and_the_server_come_and_go(browser: Browser):
    models = Models([Model(), Model(name="other")])
    with served(Starlette(routes=page_routes(models))) as site, visit(browser, site, "#/other/1") as visited:
        visited.expected = ("Failed to load resource: net::",)
        page = visited.page
        page.get_by_role("link", name="tiny").focus()
        models.loaded = [Model(name="first"), *models.loaded]
        page.wait_for_selector("nav a:has-text('first')")
        assert visited.text("h2").startswith("other")
        models.loaded, models.draining, models.ready = [Model()], True, False
        page.wait_for_selector("h2:has-text('tiny')")
        assert (visited.text("#server"), len(page.query_selector_all("nav a"))) == ("Draining", 1)
        page.context.set_offline(True)
        page.wait_for_selector("#server:has-text('No connection')")
        assert page.is_visible("article")
        models.loaded = []
        page.context.set_offline(False)
        page.wait_for_selector("text=No model is loaded.")


def test_a_part_that_is_broken_is_left_out_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    installed = {"arr_coc": "exportkit.arr_coc.page", "empty": "tests.serve.page.doubles", "missing": "no_such_module"}
    found = {name: EntryPoint(name, value, "exportkit.pages") for name, value in installed.items()}
    monkeypatch.setattr(module, "declared", lambda group: found)
    with caplog.at_level(logging.ERROR):
        assert list(page_parts.__wrapped__()) == ["arr_coc"]
    assert [record.getMessage().split()[2] for record in caplog.records] == ["'empty'", "'missing'"]


def test_a_part_whose_files_do_not_come_leaves_plain_tensors(browser: Browser):
    models = Models([Model(call=region_call())])
    with served(Starlette(routes=page_routes(models))) as site, browser.new_page() as page:
        page.route("**/part.js", lambda route: route.abort())
        page.goto(site.url)
        page.wait_for_selector("text=The part arr_coc of this page cannot be loaded.")
        assert page.get_by_role("button", name="Run").count() == 1
