"""What the page's URLs answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from exportkit.package import manifest as m
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.repository import IndexEntry
from exportkit.serve.engine.statistics import REQUEST_SECONDS, Statistics
from exportkit.serve.page.page_routes import open_paths, page_routes
from exportkit.serve.page.page_status import page_status, percentile
from exportkit.serve.page.regions import region_inputs
from exportkit.serve.protocol.inference import Timing
from exportkit.serve.serve_options import ServeOptions
from tests.serve.page.doubles import Model, Models, manifest, region_call
from tests.serve.page.in_thread import Site, served

TIMING = Timing(queue=0.0, compute_input=0.0, compute_infer=0.0, compute_output=0.0, batch_rows=1)


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
    seen = set()
    while pending:
        path = pending.pop()
        seen.add(path)
        answer = page.get(path)
        assert answer.status == 200, path
        pending |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)} - seen
    assert seen | {"/"} == open_paths(), "a file that nothing names"


def test_files_name_no_other_place(page: Site):
    for path in open_paths():
        assert set(re.findall(r"https?://[^\s\"']+", page.get(path).text)) <= {"http://www.w3.org/2000/svg"}, path


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
    assert counters["latency"] == {"p50": 0.0025, "p99": pytest.approx(0.244)}
    assert told["regions"] is None


def test_the_status_is_json(page: Site):
    status = page.get("/page/status")
    assert status.headers["content-type"] == "application/json"
    assert status.json() == json.loads(json.dumps(page_status(Models([Model()]), ServeOptions())))


def test_a_model_that_did_nothing_yet_has_no_latency():
    counters = page_status(Models([Model()]), ServeOptions())["models"][0]["counters"]
    assert (counters["latency"], counters["mean_batch"]) == ({"p50": None, "p99": None}, None)
    json.dumps(counters, allow_nan=False)


@given(st.lists(st.floats(0, 60), min_size=1), st.floats(0.01, 1))
def test_a_percentile_lies_in_the_bucket_of_the_request_that_it_is_about(seconds: list[float], share: float):
    counted = Statistics()
    for each in seconds:
        counted.succeeded(TIMING, each)
    found = percentile(counted.request_seconds, share)
    below = sum(each <= found for each in seconds)
    bound = min(each for each in REQUEST_SECONDS if each >= found - 1e-12)
    within = sum(each <= bound for each in seconds)
    assert within >= share * len(seconds) - 1e-9
    assert below <= within


def test_a_model_that_chooses_patches_is_recognised_by_its_call():
    expected = {"image": "picture", "query": "wanted", "mask": None, "patch": 14, "width": 8}
    assert region_inputs(region_call()) == expected
    model = Model(manifest=manifest(region_call()))
    assert page_status(Models([model]), ServeOptions())["models"][0]["regions"] == expected


def test_query_tokens_are_recognised_with_their_mask():
    call = region_call()
    batch, tokens = m.Size(dimension="b"), m.Size(dimension="t")
    inputs = (
        call.inputs[0],
        m.TensorInput(name="wanted", dtype="float32", shape=(batch, tokens, 8)),
        m.TensorInput(name="counts", dtype="bool", shape=(batch, tokens)),
    )
    dimensions = (*call.dimensions, m.Dimension(name="t", min=1, max=9))
    found = region_inputs(region_call(inputs=inputs, dimensions=dimensions))
    assert found is not None
    assert (found["query"], found["mask"]) == ("wanted", "counts")
    few = (*call.dimensions, m.Dimension(name="t", min=2, max=9))
    assert region_inputs(region_call(inputs=inputs, dimensions=few)) is None


def changed(index: int, **changes) -> m.Call:
    inputs = list(region_call().inputs)
    inputs[index] = msgspec.structs.replace(inputs[index], **changes)
    return region_call(inputs=tuple(inputs))


BATCH, ROWS, COLUMNS = (m.Size(dimension="b"), m.Size(dimension="gh", scale=14), m.Size(dimension="gw", scale=14))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(region_call(outputs=region_call().outputs[1:]), id="no features"),
        pytest.param(region_call(inputs=region_call().inputs[:1]), id="no query"),
        pytest.param(region_call(inputs=region_call().inputs[1:]), id="no image"),
        pytest.param(changed(0, dtype="uint8"), id="image of bytes"),
        pytest.param(changed(0, shape=(BATCH, 4, ROWS, COLUMNS)), id="four channels"),
        pytest.param(changed(0, shape=(BATCH, 3, ROWS, ROWS)), id="squares only"),
        pytest.param(changed(0, shape=(BATCH, 3, 224, 224)), id="one size only"),
        pytest.param(changed(0, shape=(2, 3, ROWS, COLUMNS)), id="pairs only"),
        pytest.param(changed(0, shape=(BATCH, 3, ROWS, m.Size(dimension="gw", scale=16))), id="oblong patches"),
        pytest.param(changed(1, shape=(BATCH, 9)), id="a query of another space"),
        pytest.param(changed(1, dtype="float16"), id="a query of another dtype"),
        pytest.param(
            region_call(
                inputs=(*region_call().inputs, m.TensorInput(name="more", dtype="int64", shape=(1, 1, 1, 1))),
            ),
            id="one input more",
        ),
    ],
)
def test_other_models_are_not_taken_for_such_a_model(call: m.Call):
    assert region_inputs(call) is None
