"""HTTP requests that break the Open Inference Protocol, each in one way."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.serve.workload import Workload, http_post

_HEADER_LENGTH = "Inference-Header-Content-Length"


def _field(name: str, value: object) -> Callable[[Workload, random.Random], bytes]:
    """A good request but for a header field."""

    def broken(asked: Workload, chance: random.Random) -> bytes:
        pattern = rf"\r\n{name}: [^\r]*".encode()
        return re.sub(pattern, f"\r\n{name}: {value}".encode(), asked.infer_request(), count=1)

    return broken


def _json(change: Callable[[dict[str, Any]], None]) -> Callable[[Workload, random.Random], bytes]:
    """A good request but for its JSON."""

    def broken(asked: Workload, chance: random.Random) -> bytes:
        head, _, body = asked.infer_request().partition(b"\r\n\r\n")
        found = re.search(rf"{_HEADER_LENGTH}: (\d+)".encode(), head)
        assert found is not None
        document = json.loads(body[: int(found[1])])
        change(document)
        text = json.dumps(document).encode()
        path = f"/v2/models/{asked.model}/infer"
        return http_post(path, text + body[int(found[1]) :], {_HEADER_LENGTH: len(text)})

    return broken


def _body(body: bytes, **fields: object) -> Callable[[Workload, random.Random], bytes]:
    return lambda asked, _: http_post(f"/v2/models/{asked.model}/infer", body, fields)


def _noise(asked: Workload, chance: random.Random) -> bytes:
    """A good request with some bytes of its JSON exchanged."""
    request = bytearray(asked.infer_request())
    start = request.index(b"\r\n\r\n") + 4
    for _ in range(3):
        request[start + chance.randrange(40)] = chance.choice(b'\x00\xff{}[]"')
    return bytes(request)


def _first(document: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = document["inputs"][0]
    return first


BROKEN: Mapping[str, Callable[[Workload, random.Random], bytes]] = {
    "a header length beyond the body": _field(_HEADER_LENGTH, 99_999_999_999),
    "a negative header length": _field(_HEADER_LENGTH, -1),
    "a header length that is not a number": _field(_HEADER_LENGTH, "1e30"),
    "an unknown encoding": lambda asked, _: asked.infer_request().replace(
        b"Host: localhost", b"Host: localhost\r\nContent-Encoding: br", 1
    ),
    "an empty body": _body(b""),
    "text": _body(b"hello"),
    "deep JSON": _body(b"[" * 100_000),
    "noise": _noise,
    "a bomb": _body(gzip.compress(bytes(1 << 26)), **{"Content-Encoding": "gzip"}),
    "a truncated gzip": _body(gzip.compress(bytes(10_000))[:20], **{"Content-Encoding": "gzip"}),
    "no inputs": _json(lambda document: document.update(inputs=[])),
    "an input twice": _json(lambda document: document["inputs"].append(document["inputs"][0])),
    "an unknown input": _json(lambda document: _first(document).update(name="x" * 5000)),
    "an unknown datatype": _json(lambda document: _first(document).update(datatype="FP33")),
    "BYTES": _json(lambda document: _first(document).update(datatype="BYTES")),
    "a shape that overflows": _json(lambda document: _first(document).update(shape=[2**62, 2**62])),
    "a negative size": _json(lambda document: _first(document).update(shape=[-1, 4])),
    "a wrong size in bytes": _json(lambda document: _first(document)["parameters"].update(binary_data_size=7)),
    "an unknown output": _json(lambda document: document.update(outputs=[{"name": "nothing"}])),
    "a negative timeout": _json(lambda document: document["parameters"].update(timeout=-5)),
}
