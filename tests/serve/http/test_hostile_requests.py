"""Whatever is sent, the answer is an answer or a refusal in the protocol's JSON, and nothing stays reserved."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from tests.serve.http.asking import Reply, ask, infer_body
from tests.serve.http.doubles import FakeModel, FakeRepository

STATUSES = {200, 400, 403, 404, 405, 408, 413, 415, 429, 499, 501, 503, 504}
OPTIONS = HttpOptions(idle_seconds=5.0)

names = st.sampled_from(["x", "y", "", "a/b", "\u2603"])
numbers = st.one_of(st.integers(-2, 40), st.sampled_from([1 << 31, 1 << 63, 1 << 64, 10**30]))
lengths = st.one_of(numbers.map(str), st.sampled_from(["", "1e9", "0x10", "+1", "\u0663", "99999999999"]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=6,
)
parameters = st.dictionaries(
    st.sampled_from(
        ["binary_data_size", "binary_data", "binary_data_output", "timeout", "priority", "sequence_id", "headers"]
        + ["classification", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "mine"]
    ),
    values,
    max_size=3,
)
tensors = st.fixed_dictionaries(
    {},
    optional={
        "name": st.one_of(names, values),
        "datatype": st.one_of(st.sampled_from(["FP32", "BYTES", "BF16", "FP99"]), values),
        "shape": st.one_of(st.lists(numbers, max_size=3), values),
        "data": values,
        "parameters": st.one_of(parameters, values),
    },
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "id": values,
        "inputs": st.one_of(st.lists(tensors, max_size=2), values),
        "outputs": st.one_of(st.lists(tensors, max_size=2), values),
        "parameters": st.one_of(parameters, values),
    },
)
VALID, VALID_HEADERS = infer_body(("x", "FP32", [2], bytes(8)))
bodies = st.one_of(
    st.just(VALID),
    st.binary(max_size=60),
    messages.map(lambda message: json.dumps(message).encode()),
    st.tuples(messages, st.binary(max_size=40)).map(lambda parts: json.dumps(parts[0]).encode() + parts[1]),
    st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)).map(
        lambda change: VALID[: change[0]] + bytes([VALID[change[0]] ^ change[1]]) + VALID[change[0] + 1 :]
    ),
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "inference-header-content-length": st.one_of(
            lengths, st.just(VALID_HEADERS["inference-header-content-length"])
        ),
        "content-length": lengths,
        "content-encoding": st.sampled_from(["gzip", "deflate", "identity", "br", "", "gzip, deflate"]),
        "accept-encoding": st.sampled_from(["gzip", "deflate", "gzip;q=x", ",,;;", "*"]),
        "x-request-id": st.text(st.characters(codec="latin-1"), max_size=5),
        "expect": st.just("100-continue"),
    },
)
methods = st.sampled_from(["POST"] * 12 + ["GET", "HEAD", "PUT", "FETCH"])
paths = st.one_of(
    st.just("/v2/models/x/infer"),
    st.just("/v2/models/x/versions/1/infer/"),
    st.lists(
        st.sampled_from(
            ["v2", "models", "x", "versions", "1", "infer", "ready", "stats", "config", "repository", "index", "load"]
            + ["unload", "systemsharedmemory", "cudasharedmemory", "region", "register", "status", "..", "", "\u2603"]
        ),
        max_size=6,
    ).map(lambda parts: "/" + "/".join(parts)),
)
packed = st.sampled_from([None, gzip.compress, zlib.compress])


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "exportkit")


def test_anything() -> None:
    @given(methods, paths, bodies, headers, st.integers(1, 80), packed, st.booleans(), st.booleans())
    @example("POST", "/v2/models/x/infer", VALID, VALID_HEADERS, 80, None, False, False)
    @settings(max_examples=250)
    def anything(
        method: str, path: str, body: bytes, headers: dict[str, str], step: int, pack: Any, chunked: bool, leaves: bool
    ) -> None:
        model = FakeModel("x", {"x": ("FP32", [-1])}, 100)
        app = make_app(FakeRepository(model), OPTIONS)
        if pack is not None:
            body = pack(body)
        headers = {name: value for name, value in headers.items() if not (chunked and name == "content-length")}
        chunks = [body[start : start + step] for start in range(0, len(body), step)] or [b""]
        if not chunked:
            headers.setdefault("content-length", str(len(body)))
        reply = ask(app, method, path, chunks, headers, chunked=chunked, leaves=leaves)
        check(reply, method)
        assert model.held == 0

    anything()


def check(reply: Reply, method: str) -> None:
    record = reply.scope["exportkit"]
    assert record.status in STATUSES
    assert reply.status == (0 if record.status == 499 else record.status)
    assert (record.error is None) == (record.status == 200)
    if reply.status:
        assert reply.complete
        assert reply.headers["x-request-id"] == record.id
    if reply.status not in (0, 200) and method != "HEAD":
        assert reply.error
