"""The parts of the page that installed packages bring."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

from exportkit.serve.page import page_parts as module
from exportkit.serve.page.page_parts import page_parts
from exportkit.serve.page.page_routes import open_paths, page_routes
from exportkit.serve.page.page_status import page_status
from exportkit.serve.serve_options import ServeOptions
from tests.serve.page.doubles import Model, Models
from tests.serve.page.in_thread import served
from tests.serve.page.visits import visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PYTHON = """
from pathlib import Path

STATIC = Path(__file__).parent / "files"


def recognise(call):
    return {"first": call.inputs[0].name} if call.inputs[0].dtype == "float32" else None
"""
SCRIPT = """
import { el } from "../../dom.js";

export const tryIt = (model, facts) => el("p", { class: "theirs" }, `${model.name} takes ${facts.first}`);
"""

Declare = Callable[[dict[str, str]], None]


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Lets an installed package `their_part` declare parts of the page: their names and modules."""
    (tmp_path / "their_part.py").write_text(PYTHON)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "part.js").write_text(SCRIPT)
    (tmp_path / "files" / "part.css").write_text(".theirs { color: rgb(1 2 3); }")
    (tmp_path / "files" / "notes.txt").write_text("not for the page")
    monkeypatch.syspath_prepend(tmp_path)

    def declared(entries: dict[str, str]) -> None:
        found = {name: EntryPoint(name, value, "exportkit.pages") for name, value in entries.items()}
        monkeypatch.setattr(module, "declared", lambda group: found if group == "exportkit.pages" else {})

    page_parts.cache_clear()
    yield declared
    page_parts.cache_clear()
    sys.modules.pop("their_part", None)


def test_a_part_of_an_installed_package_shows_the_models_that_it_recognises(browser: Browser, declare: Declare):
    declare({"theirs": "their_part"})
    with served(Starlette(routes=page_routes(Models([Model()]), ServeOptions()))) as site:
        assert site.get("/page/status").json()["models"][0]["part"] == {"name": "theirs", "facts": {"first": "image"}}
        with visit(browser, site) as visited:
            assert visited.text(".theirs") == "tiny takes image"
            color = "() => getComputedStyle(document.querySelector('.theirs')).color"
            assert visited.evaluate(color) == "rgb(1, 2, 3)"
            assert visited.page.get_by_text("Try it with plain tensors").count() == 1


def test_only_files_of_the_page_s_kinds_are_served_of_a_part(declare: Declare):
    declare({"theirs": "their_part"})
    paths = {path for path in open_paths() if "parts" in path}
    assert paths == {"/page/parts/theirs/part.js", "/page/parts/theirs/part.css"}


def test_a_part_that_is_broken_is_left_out_and_the_log_says_why(
    declare: Declare, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "broken_part.py").write_text("1 / 0")
    (tmp_path / "empty_part.py").write_text(PYTHON.replace("files", "no such folder"))
    (tmp_path / "raising_part.py").write_text(PYTHON.replace("return {", "1 / 0, {"))
    broken = {"../..": "their_part", "broken": "broken_part", "empty": "empty_part", "missing": "no_such_module"}
    declare({**broken, "raising": "raising_part", "theirs": "their_part"})
    with caplog.at_level(logging.ERROR):
        assert list(page_parts()) == ["raising", "theirs"]
        for _ in range(2):
            (model,) = page_status(Models([Model()]), ServeOptions())["models"]
            assert model["part"]["name"] == "theirs"
    said = [re.findall(r"part '(.*?)' of the page", record.getMessage()) for record in caplog.records]
    assert said == [[name] for name in (*broken, "raising")]


def test_a_model_that_no_part_recognises_is_tried_with_plain_tensors(browser: Browser, declare: Declare):
    declare({})
    models = Models([Model()])
    assert page_status(models, ServeOptions())["models"][0]["part"] is None
    with served(Starlette(routes=page_routes(models, ServeOptions()))) as site, visit(browser, site) as visited:
        assert visited.page.get_by_role("button", name="Run").count() == 1


def test_a_part_whose_files_cannot_be_loaded_leaves_plain_tensors(browser: Browser, declare: Declare, tmp_path: Path):
    declare({"theirs": "their_part"})
    (tmp_path / "files" / "part.js").write_text('import "./missing.js";')
    app = Starlette(routes=page_routes(Models([Model()]), ServeOptions()))
    with served(app) as site, visit(browser, site) as visited:
        visited.expected = ("Failed to load resource: the server responded with a status of 404",)
        assert "theirs of this page cannot be loaded" in visited.text("article .problem")
        assert visited.page.get_by_role("button", name="Run").count() == 1
