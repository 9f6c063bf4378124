"""What the page asks of any model, and that it shows what the model answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from starlette.applications import Starlette

import exportkit
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.page.page_routes import page_routes
from exportkit.serve.serve_options import ServeOptions
from exportkit.serve.statuses import QueueFullError
from tests.serve.page.doubles import Model, Models
from tests.serve.page.in_thread import served, served_packages
from tests.serve.page.sent_requests import DTYPES, Recorder
from tests.serve.page.visits import rows_of, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_any_model_can_be_tried(browser: Browser, tiny_package: Path):
    recorder = Recorder()
    with served_packages(tiny_package, around=recorder.around) as site, visit(browser, site) as visited:
        page = visited.page
        page.get_by_label("batch 1..4").fill("3")
        page.get_by_label("gh 1..6").fill("2")
        page.get_by_label("image float32").select_option("random")
        page.get_by_label("query.features").select_option("ones")
        page.get_by_label("offset").select_option("zeros")
        assert visited.text(".any .row .faint") == "9.30 kB to send"
        page.get_by_role("button", name="Run").click()
        page.wait_for_selector(".result table")
        (sent,) = recorder.sent
        assert sent["image"].shape == (3, 3, 32, 8)
        assert 0.8 < float(sent["image"].std()) < 1.2
        assert torch.equal(sent["query.features"], torch.ones(3, 5))
        assert torch.equal(sent["offset"], torch.zeros(5))
        with exportkit.load(tiny_package) as model:
            query = {"features": sent["query.features"], "mode": "scaled"}
            answer = model(sent["image"], query, offset=sent["offset"])
        expected = [*answer["regions"], answer["rest"][0]]
        for row, tensor in zip(rows_of(visited, ".result"), expected):
            kind = f"FP32{list(tensor.shape)}"
            assert row[1].startswith(kind)
            numbers = [float(number) for number in row[1].removeprefix(kind).removesuffix(", …").split(", ")]
            assert numbers == pytest.approx(tensor.flatten()[:8].tolist(), rel=1e-5)


class Full(Model):
    """A model that takes nothing."""

    def admit(self, size: int, *, waits: bool = False) -> Any:
        raise QueueFullError("<b>full</b>")


def test_a_refusal_is_shown_in_the_servers_words(browser: Browser):
    repository = Models([Full(max_body=1 << 20)])
    app = make_app(repository, HttpOptions(), routes=page_routes(repository, ServeOptions()))
    with served(app) as site, visit(browser, site) as visited:
        visited.expected = ("Failed to load resource: the server responded with a status of 429",)
        visited.page.get_by_role("button", name="Run").click()
        visited.page.wait_for_selector(".result .problem")
        assert visited.text(".result").startswith("<b>full</b>")


def test_every_datatype_is_written_and_read_as_torch_does(browser: Browser):
    script = """async (text) => {
        const { decode, encode } = await import("./page/tensors.js");
        const [datatype, numbers, raw] = JSON.parse(text);
        const said = (one) => (Object.is(one, -0) ? "-0" : String(one));
        const read = Array.from(decode(datatype, Uint8Array.from(raw)), said);
        return JSON.stringify([Array.from(encode(datatype, Float64Array.from(numbers))), read]);
    }"""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    floats = torch.randn(3000) * torch.exp(8 * torch.randn(3000))
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.9, 65520.0, 2.0**-25, 3 * 2.0**-25]
    edges = torch.tensor([0.0, -0.0, 65504.0, 2.0**-24, 2.0**-14, -(2.0**-15), *ties])
    app = Starlette(routes=page_routes(Models([]), ServeOptions()))
    with served(app) as site, visit(browser, site) as visited:
        for datatype, dtype in DTYPES.items():
            numbers = torch.cat([floats, edges]) if dtype.is_floating_point else torch.tensor([0.0, 1.0])
            stored = halves.view(dtype) if dtype.itemsize == 2 else numbers.to(dtype)
            raw = stored.view(torch.uint8).tolist()
            answer = visited.evaluate(script, json.dumps([datatype, numbers.tolist(), raw]))
            written, said = json.loads(answer)
            assert written == numbers.to(dtype).view(torch.uint8).tolist(), datatype
            read = torch.tensor([float(text) for text in said], dtype=torch.float64)
            assert torch.equal(read.nan_to_num(nan=7e77), stored.double().nan_to_num(nan=7e77)), datatype
