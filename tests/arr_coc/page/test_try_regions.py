"""What ARR-COC's part of the page asks of a model, and that it shows what the model answers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import exportkit
from exportkit.arr_coc.model import Region, build, region_query
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.page.page_routes import page_routes
from tests.arr_coc.page.eager_regions import eager
from tests.serve.page.doubles import Models
from tests.serve.page.in_thread import Site, served, served_packages
from tests.serve.page.sent_requests import Recorder
from tests.serve.page.visits import Visit, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SMALL = {"left": 70, "top": 40, "width": 60, "height": 20}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "straight-through": {"gating": "straight-through"},
    "int8": {"feature_dtype": "int8", "k": 60},
    "few": {"k": 9},
}


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def site(arr_coc_package: Path, recorder: Recorder) -> Iterator[Site]:
    with served_packages(arr_coc_package, around=recorder.around) as site:
        yield site


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    return {name: build(**arguments) for name, arguments in VARIANTS.items()}


@pytest.fixture(scope="module")
def eager_site(modules: dict[str, Any], recorder: Recorder) -> Iterator[Site]:
    models = [eager(module, name=name) for name, module in modules.items()]
    models.append(eager(modules["plain"], tokens=True, name="tokens"))
    repository = Models(models)
    app = make_app(repository, HttpOptions(), routes=page_routes(repository))
    with served(recorder.around(app)) as site:
        yield site


def rows_of(visited: Visit, table: str) -> list[list[str]]:
    script = """table => [...document.querySelectorAll(`${table} tbody tr`)]
        .map((row) => [...row.cells].map((cell) => cell.textContent))"""
    return visited.evaluate(script, table)


def photograph(width: int, height: int, mode: str = "RGB") -> tuple[np.ndarray, dict[str, Any]]:
    """Random pixels, and the file that a browser gets."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, "PNG")
    return pixels, {"name": "picture.png", "mimeType": "image/png", "buffer": file.getvalue()}


def choose(visited: Visit, file: dict[str, Any]) -> None:
    visited.page.set_input_files("input[type=file]", file)
    visited.page.wait_for_function("name => document.querySelector('.said').textContent.includes('pixels')", arg="")


def ask(visited: Visit, **region: int) -> None:
    """Writes a region into the fields, and waits for what the model chose."""
    for name, value in region.items():
        visited.page.get_by_label(name, exact=True).fill(str(value))
    visited.page.get_by_role("button", name="Find more like this").click()
    visited.page.wait_for_selector(".said b, .said .problem")


def test_what_it_draws_is_what_the_package_answers(
    browser: Browser, site: Site, arr_coc_package: Path, recorder: Recorder
):
    with visit(browser, site, "#/arr_coc/0") as visited:
        recorder.sent.clear()
        ask(visited)
        last = recorder.sent[-1]
        assert last["image"].shape == (1, 3, 512, 768)
        levels = last["image"] * 255
        assert torch.allclose(levels, levels.round(), atol=1e-4)
        with exportkit.load(arr_coc_package) as model:
            answer = model(last["image"], last["query"])
        indices, budgets, scores = (answer[name][0] for name in ("indices", "budgets", "scores"))
        said = visited.text(".said")
        assert f"{len(indices)} of {answer['relevance'].shape[1]:,} patches" in said
        assert f"{int(budgets.sum()):,} tokens in all" in said
        columns = 768 // 16
        rows = rows_of(visited, ".scroll table")
        assert [int(row[0]) for row in rows] == list(range(1, len(indices) + 1))
        assert [(int(row[1]) - 1) * columns + int(row[2]) - 1 for row in rows] == indices.tolist()
        assert [int(row[3]) for row in rows] == budgets.tolist()
        assert [float(row[4]) for row in rows] == pytest.approx(scores.tolist(), rel=1e-5)
        look_around(visited, answer, columns)


def look_around(visited: Visit, answer: dict[str, torch.Tensor], columns: int) -> None:
    """What is said about a patch under the pointer and under the keys' cursor is what the model said."""
    best = int(answer["indices"][0, 0])
    row, column = divmod(best, columns)
    box = visited.page.locator(".stage svg").bounding_box()
    assert box is not None
    side = box["width"] / columns
    visited.page.mouse.move(box["x"] + (column + 0.5) * side, box["y"] + (row + 0.5) * side)
    said = f"kept as number 1, {int(answer['budgets'][0, 0])} tokens, relevance {answer['relevance'][0, best]:.2f}"
    assert visited.text(".readout") == f"Row {row + 1}, column {column + 1}: {said}"
    left_out = next(patch for patch in range(columns) if patch not in answer["indices"][0])
    visited.page.focus(".stage svg")
    for _ in range(row):
        visited.page.keyboard.press("ArrowUp")
    for _ in range(abs(left_out - column)):
        visited.page.keyboard.press("ArrowRight" if left_out > column else "ArrowLeft")
    relevance = f"{answer['relevance'][0, left_out]:.2f}"
    assert visited.text(".readout") == f"Row 1, column {left_out + 1}: left out, relevance {relevance}"


def test_the_query_is_the_regions_as_the_library_makes_it(
    browser: Browser, site: Site, recorder: Recorder, modules: Any
):
    with visit(browser, site, "#/arr_coc/0") as visited:
        for region in (
            {"left": 500, "top": 83, "width": 77, "height": 121},
            {"left": 0, "top": 0, "width": 9, "height": 3},
        ):
            recorder.sent.clear()
            visited.page.get_by_role("button", name="Use the drawn sample").click()
            ask(visited, **region)
            last = recorder.sent[-1]
            with torch.no_grad():
                query = region_query(modules["plain"], last["image"], Region(**region))
            torch.testing.assert_close(last["query"], query, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("variant", [*VARIANTS, "tokens"])
def test_features_are_read_whatever_gates_or_quantises_them(
    browser: Browser, eager_site: Site, recorder: Recorder, modules: Any, variant: str
):
    with visit(browser, eager_site, f"#/{variant}/1") as visited:
        recorder.sent.clear()
        choose(visited, photograph(330, 330)[1])
        region = {"left": 70, "top": 40, "width": 190, "height": 90} if variant != "few" else SMALL
        ask(visited, **region)
        assert visited.text(".said").startswith(f"{VARIANTS.get(variant, {}).get('k', 200)} of 400 patches")
        last = recorder.sent[-1]
        module = modules.get(variant, modules["plain"])
        with torch.no_grad():
            query = region_query(module, last["image"], Region(**region))
        found = last["query"].flatten(0, 1)[None] if variant == "tokens" else last["query"]
        coarse = variant == "int8"
        torch.testing.assert_close(found.view_as(query), query, rtol=1e-3, atol=5e-3 if coarse else 1e-5)
        assert len(recorder.sent) == int(re.findall(r"(\d+) small requests", visited.text(".said"))[0]) + 1


def test_a_picture_is_fitted_into_what_the_model_takes(browser: Browser, eager_site: Site, recorder: Recorder):
    shapes = {(20, 10): (32, 64), (2000, 20): (32, 1024), (1100, 730): (496, 768)}
    with visit(browser, eager_site, "#/few/1") as visited:
        for (width, height), (rows, columns) in shapes.items():
            choose(visited, photograph(width, height)[1])
            ask(visited, width=9, height=9)
            assert tuple(recorder.sent[-1]["image"].shape[2:]) == (rows, columns)
        pixels, file = photograph(40, 40, "RGBA")
        choose(visited, file)
        ask(visited)
        opaque = pixels[:32, :32, 3:] / 255
        expected = torch.from_numpy((pixels[:32, :32, :3] / 255) * opaque + 1 - opaque).permute(2, 0, 1)[None].float()
        torch.testing.assert_close(recorder.sent[-1]["image"], expected, rtol=0, atol=2.5 / 255)


def test_a_region_is_drawn_with_the_pointer(browser: Browser, eager_site: Site, recorder: Recorder):
    with visit(browser, eager_site, "#/plain/1") as visited:
        stage = visited.page.locator(".stage svg")
        box = stage.bounding_box()
        assert box is not None
        scale = 768 / box["width"]
        visited.page.mouse.move(box["x"] + 200, box["y"] + 120)
        visited.page.mouse.down()
        visited.page.mouse.move(box["x"] + 120, box["y"] + 60, steps=3)
        visited.page.mouse.up()
        visited.page.wait_for_selector(".said b")
        drawn = {name: int(visited.page.get_by_label(name, exact=True).input_value()) for name in ("left", "top")}
        assert drawn == {"left": pytest.approx(120 * scale, abs=1), "top": pytest.approx(60 * scale, abs=1)}


def test_what_is_no_image_is_refused(browser: Browser, eager_site: Site):
    with visit(browser, eager_site, "#/plain/1") as visited:
        visited.page.set_input_files("input[type=file]", {"name": "<b>.png", "mimeType": "image/png", "buffer": b"no"})
        visited.page.wait_for_selector(".said .problem")
        assert visited.text(".said") == "<b>.png is not an image that this browser can read."
