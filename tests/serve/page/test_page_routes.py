"""What the page's URLs answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import urljoin

import pytest
from starlette.applications import Starlette

from exportkit.package import manifest as m
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.repository import IndexEntry
from exportkit.serve.page.page_parts import page_parts
from exportkit.serve.page.page_routes import open_paths, page_routes
from exportkit.serve.page.page_status import page_status
from exportkit.serve.protocol.inference import InferTiming
from exportkit.serve.serve_options import ServeOptions
from tests.serve.page.doubles import Model, Models
from tests.serve.page.in_thread import Site, served

TIMING = InferTiming(queue=0.0, compute_input=0.0, compute_infer=0.0, compute_output=0.0, batch_rows=1)


@pytest.fixture(scope="module")
def page() -> Iterator[Site]:
    with served(Starlette(routes=page_routes(Models([Model()]), ServeOptions()))) as site:
        yield site


def test_every_answer_forbids_what_the_page_does_not_need(page: Site):
    for path in [*open_paths(), "/page/status"]:
        answer = page.get(path)
        assert answer.status == 200, path
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self' blob: data:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_files_are_kept_by_a_browser_only_until_they_change(page: Site):
    for path in open_paths():
        first = page.get(path)
        assert first.headers["cache-control"] == "no-cache"
        again = page.get(path, headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status, again.body) == (304, b"")
        assert page.get(path, headers={"If-None-Match": '"other"'}).status == 200
        assert page.get(path, method="HEAD").headers["etag"] == first.headers["etag"]
    assert page.get("/page/status").headers["cache-control"] == "no-store"


def test_the_page_names_only_files_that_there_are(page: Site):
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page.get("/").text))
    assert named
    pending = {f"/{path}" for path in named}
    pending |= {f"/page/parts/{name}/part{kind}" for name in page_parts() for kind in (".js", ".css")}
    seen = set()
    while pending:
        path = pending.pop()
        seen.add(path)
        answer = page.get(path)
        assert answer.status == 200, path
        names = re.findall(r'(?:from "(?=\.)|new URL\(")([^"]+)"', answer.text)
        pending |= {urljoin(path, name) for name in names} - seen
    assert seen | {"/"} == open_paths(), "a file that nothing names"


def test_files_name_no_other_place(page: Site):
    own = {"http://www.w3.org/2000/svg", "http://localhost."}
    for path in open_paths():
        assert set(re.findall(r"https?://[^\s\"']+", page.get(path).text)) <= own, path


@pytest.mark.parametrize("path", ["/page/", "/page/../page_routes.py", "/page/%2e%2e/page_routes.py", "/page/none.js"])
def test_no_other_file_is_reached(page: Site, path: str):
    assert page.get(path).status == 404


def test_a_page_is_only_read(page: Site):
    assert page.get("/page/status", method="POST").status == 405


def test_the_status_says_what_models_take_and_what_they_counted():
    batching = Batching(m.Dimension(name="batch", min=1, max=4), max_rows=4)
    model = Model(devices=("cpu", "cuda:1"), batching=batching, ready=False, failure="it starts again")
    for seconds in (0.002, 0.002, 0.02, 0.2):
        model.counted.succeeded(TIMING, seconds)
    model.counted.executed(3, compute_input=0.0, compute_infer=0.1, compute_output=0.0)
    model.counted.executed(1, compute_input=0.0, compute_infer=0.1, compute_output=0.0)
    model.counted.failed("full")
    model.counted.entered(4, 40)
    model.counted.entered(3, 59)
    absent = IndexEntry("absent", "2", "UNAVAILABLE", "its digest is wrong")
    status = page_status(Models([model], [absent], ready=False), ServeOptions())
    assert status["server"]["ready"] is False
    assert status["others"] == [
        {"name": "absent", "version": "2", "state": "UNAVAILABLE", "reason": "its digest is wrong"}
    ]
    (told,) = status["models"]
    assert (told["name"], told["version"], told["ready"]) == ("tiny", "1", False)
    assert told["failure"] == "it starts again"
    assert told["devices"] == ["cpu", "cuda:1"]
    assert told["batching"] == {
        "enabled": True,
        "reason": None,
        "dimension": "batch",
        "max_rows": 4,
        "bit_equal": True,
    }
    assert told["limits"] == {"body": 1000, "queued_rows": 1024, "queued_bytes": 1 << 30, "delay": 0.0}
    assert told["inputs"][0] == {
        "name": "image",
        "dtype": "float32",
        "datatype": "FP32",
        "shape": [
            {"dimension": "batch", "scale": 1, "offset": 0},
            3,
            {"dimension": "gh", "scale": 16, "offset": 0},
            8,
        ],
    }
    assert told["dimensions"] == [{"name": "batch", "min": 1, "max": 4}, {"name": "gh", "min": 1, "max": 6}]
    counters = told["counters"]
    assert counters["requests"] == 4
    assert counters["failures"] == {"full": 1}
    assert (counters["rows"], counters["executions"], counters["mean_batch"]) == (4, 2, 2.0)
    assert (counters["pending"], counters["queued_rows"], counters["queued_bytes"]) == (2, 7, 99)
    assert told["part"] is None


def test_the_status_is_json(page: Site):
    status = page.get("/page/status")
    assert status.headers["content-type"] == "application/json"
    assert status.json() == json.loads(json.dumps(page_status(Models([Model()]), ServeOptions())))


def test_a_model_that_did_nothing_yet_has_no_mean_batch():
    counters = page_status(Models([Model()]), ServeOptions())["models"][0]["counters"]
    assert counters["mean_batch"] is None
    json.dumps(counters, allow_nan=False)
