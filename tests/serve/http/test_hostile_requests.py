"""Whatever is sent, the answer is an answer or a refusal in the protocol's JSON, and nothing stays reserved."""

from __future__ import annotations

import gzip
import logging
import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from tests.serve.echo_models import EchoModel, EchoRepository
from tests.serve.http.asking import ask
from tests.serve.protocol.hostile_bodies import make

STATUSES = {200, 400, 403, 404, 405, 408, 413, 415, 429, 499, 501, 503, 504}
PARTS = ("v2", "models", "x0", "versions", "1", "infer", "ready", "stats", "config", "repository", "index", "load")

lengths = st.sampled_from(["", "0", "7", "1e9", "0x10", "+1", "-1", "\u0663", "99999999999", "9" * 30])
headers = st.fixed_dictionaries(
    {},
    optional={
        "inference-header-content-length": lengths,
        "content-length": lengths,
        "content-encoding": st.sampled_from(["gzip", "deflate", "identity", "br", "", "gzip, deflate"]),
        "accept-encoding": st.sampled_from(["gzip", "deflate", "gzip;q=x", ",,;;", "*"]),
        "x-request-id": st.text(st.characters(codec="latin-1"), max_size=5),
        "expect": st.just("100-continue"),
    },
)
methods = st.sampled_from(["POST"] * 12 + ["GET", "HEAD", "PUT", "FETCH"])
packs = st.sampled_from([None, gzip, zlib])
odd_paths = st.lists(st.sampled_from([*PARTS, "unload", "systemsharedmemory", "..", "", "\u2603"]), max_size=6)
paths = st.one_of(st.just("/v2/models/x0/infer"), odd_paths.map(lambda parts: "/" + "/".join(parts)))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "exportkit")


@given(methods, paths, st.integers(0), headers, st.integers(1, 80), packs, st.booleans(), st.booleans())
@settings(max_examples=320)
def test_anything(
    method: str, path: str, seed: int, headers: dict[str, str], step: int, pack: Any, chunked: bool, leaves: bool
) -> None:
    model = EchoModel("x0", max_body=400)
    app = make_app(EchoRepository(model), HttpOptions())
    body, length = make(random.Random(seed))
    headers = {**({} if length is None else {"inference-header-content-length": length}), **headers}
    body = body if pack is None else pack.compress(body)
    chunks = [body[start : start + step] for start in range(0, len(body), step)] or [b""]
    if chunked:
        headers.pop("content-length", None)
    else:
        headers.setdefault("content-length", str(len(body)))
    reply = ask(app, method, path, chunks, headers, chunked=chunked, leaves=leaves)
    record = reply.scope["exportkit"]
    assert record.status in STATUSES
    assert reply.status == (0 if record.status == 499 else record.status)
    assert (record.error is None) == (record.status == 200)
    assert model.held == 0
    if reply.status:
        assert reply.complete
        assert reply.headers["x-request-id"] == record.id
    if reply.status not in (0, 200):
        assert reply.error
