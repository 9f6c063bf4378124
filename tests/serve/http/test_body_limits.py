"""No body costs more memory or time than the model's limits allow, whatever its headers say."""

from __future__ import annotations

import gzip
import os
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.content_coding import PIECE, Inflater, deflated
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.datatypes import item_size
from exportkit.serve.protocol.inference import InferRequest, OutputTensor
from exportkit.serve.statuses import BadRequestError
from tests.serve.echo_models import EchoModel, EchoRepository
from tests.serve.http.asking import ask, infer_body
from tests.serve.memory import traced_memory

SMALL = "/v2/models/small/infer"  # its tensors have at most 1000 bytes
PATIENCE = HttpOptions(idle_seconds=0.2, least_rate=1e6)


def binary(size: int) -> tuple[bytes, dict[str, str]]:
    return infer_body(("x", "UINT8", [size], bytes(size)))


def in_chunks(body: bytes, size: int = 60_000) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_largest_request_fits(app: Any) -> None:
    assert ask(app, "POST", SMALL, *binary(1000)).status == 200
    assert ask(app, "POST", SMALL, *binary(1001)).status == 413


@pytest.mark.parametrize(
    ("datatype", "value", "separator"), [("UINT8", "255", ",\n" + 18 * " "), ("FP64", "-2.2250738585072014e-308", ", ")]
)
def test_the_largest_request_fits_as_json(datatype: str, value: str, separator: str) -> None:
    """Numbers as text take several times as many bytes as in binary."""
    count = 5000
    size = count * item_size(datatype)
    app = make_app(EchoRepository(EchoModel("m", datatype, size)), HttpOptions())
    data = separator.join([value] * count)
    body = f'{{"inputs": [{{"name": "x", "datatype": "{datatype}", "shape": [{count}], "data": [{data}]}}]}}'.encode()
    reply = ask(app, "POST", "/v2/models/m/infer", body)
    assert reply.json()["outputs"][0]["data"] == [float(value)] * count
    assert "inference-header-content-length" not in reply.headers
    assert ask(app, "POST", "/v2/models/m/infer", 3 * body).status == 413


@pytest.mark.parametrize("encoded", [False, True], ids=["as it is", "gzip"])
def test_chunks_over_the_limit_are_cut_while_they_come(models: EchoRepository, encoded: bool) -> None:
    app = make_app(models, HttpOptions())

    def endless() -> Iterator[bytes]:
        stream = zlib.compressobj(0, zlib.DEFLATED, 31)
        while True:
            chunk = os.urandom(1000)
            yield stream.compress(chunk) + stream.flush(zlib.Z_SYNC_FLUSH) if encoded else chunk

    headers = {"inference-header-content-length": "100"} | ({"content-encoding": "gzip"} if encoded else {})
    reply = ask(app, "POST", SMALL, endless(), headers, chunked=True, pause=0.001)
    assert reply.status == 413
    assert "1100 bytes" in reply.error
    assert reply.complete
    assert 1100 < reply.bytes_read <= 1100 + 2000  # it ends with the chunk that goes beyond
    assert sum(models.model("small").reserved) <= 1100
    assert models.model("small").held == 0


def test_chunks_grow_the_buffer_and_its_reservation(app: Any, models: EchoRepository) -> None:
    floats = os.urandom(4 << 20)
    body, headers = infer_body(("x", "FP32", [1 << 20], floats))
    reply = ask(app, "POST", "/v2/models/echo/infer", in_chunks(body), headers, chunked=True)
    assert reply.body.endswith(floats)
    model = models.model("echo")
    assert len(body) - (64 << 10) <= sum(model.reserved) <= 2 * len(body)
    assert model.held == 0


def test_a_queue_that_fills_up_while_chunks_come(app: Any, models: EchoRepository) -> None:
    models.model("echo").room = 1 << 20
    body, headers = infer_body(("x", "FP32", [1 << 20], bytes(4 << 20)))
    assert ask(app, "POST", "/v2/models/echo/infer", in_chunks(body), headers, chunked=True).status == 429


def test_an_accepted_upload_is_answered_though_the_server_drains(app: Any, models: EchoRepository) -> None:
    model = models.model("echo")
    body, headers = infer_body(("x", "FP32", [1 << 20], bytes(4 << 20)))

    def chunks() -> Iterator[bytes]:
        for chunk in in_chunks(body):
            yield chunk
            model.ready = False

    assert ask(app, "POST", "/v2/models/echo/infer", chunks(), headers, chunked=True).status == 200


@pytest.mark.parametrize(
    ("model", "size", "status"),
    [
        ("forgets", 8 << 20, 200),
        ("forgets", 8 << 20 | 4, 413),
        ("absent-minded", 8 << 20, 400),
        ("not understood", (8 << 20) - 1, 400),
    ],
)
def test_a_body_is_forgotten_before_its_answer_is_sent(model: str, size: int, status: int) -> None:
    """A client that takes its answer slowly does not hold the memory of its request as well."""

    def forget(request: InferRequest) -> list[OutputTensor]:
        double.requests.clear()
        if model != "forgets":
            raise BadRequestError("never mind")
        return [OutputTensor("x", "UINT8", (1,), memoryview(b"x"))]

    double = EchoModel(model, "UINT8", 8 << 20, forget)
    app = make_app(EchoRepository(double), HttpOptions())
    body, headers = binary(size)
    chunks = in_chunks(body)
    if model == "not understood":
        headers = {name: str(int(length) - 1) for name, length in headers.items()}
    held: list[int] = []
    with traced_memory() as memory:
        note = {"begins": lambda: held.append(tracemalloc.get_traced_memory()[0])}
        reply = ask(app, "POST", f"/v2/models/{model}/infer", chunks, headers, chunked=True, **note)
    assert reply.status == status
    assert memory.peak > 8 << 20
    assert held[0] < 1 << 20


# --- compression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_is_refused_before_it_bursts(app: Any, models: EchoRepository, coding: str) -> None:
    """64 MiB of zeros, in 64 KiB, for a model that takes 1000 bytes."""
    bomb = b"".join(deflated([bytes(64 << 20)], "gzip" if coding == "gzip" else "deflate"))
    headers = {"content-encoding": coding, "inference-header-content-length": "100"}
    limit = 1100
    assert len(bomb) < 64 << 20 >> 7
    with traced_memory() as memory:
        reply = ask(app, "POST", SMALL, bomb[:limit], headers)
    assert reply.status == 413
    assert memory.peak < 4 * PIECE
    assert sum(models.model("small").reserved) <= limit


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_damaged_data(app: Any, coding: str) -> None:
    body, headers = infer_body(("x", "UINT8", [500], os.urandom(500)))
    whole = b"".join(deflated([body], "gzip" if coding == "gzip" else "deflate"))
    headers["content-encoding"] = coding
    assert ask(app, "POST", SMALL, whole, headers).status == 200
    for damaged, words in [
        (whole[:-1], "ends in the middle"),
        (b"", "ends in the middle"),
        (b"\0" + whole, "is not"),
        (whole + bytes(9), "goes on after the end"),
        (whole[:200] + b"\0\0\0" + whole[203:], "is not"),
    ]:
        reply = ask(app, "POST", SMALL, damaged, headers)
        assert reply.status == 400
        assert words in reply.error


@given(st.lists(st.binary(max_size=2000), max_size=5), st.integers(1, 700), st.sampled_from(["gzip", "deflate"]))
def test_inflating_gives_back_what_was_deflated(parts: list[bytes], step: int, coding: Any) -> None:
    inflater = Inflater(coding)
    data = b"".join(deflated(parts, coding))
    found = [b"".join(inflater.pieces(data[start : start + step])) for start in range(0, len(data), step)]
    inflater.end()
    assert b"".join(found) == b"".join(parts)


def test_pieces_are_bounded_and_complete() -> None:
    """zlib keeps bytes inside when a piece is full and the input is used up."""
    for size in (PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 10 * PIECE + 7):
        pieces = list(Inflater("deflate").pieces(zlib.compress(bytes(size))))
        assert sum(map(len, pieces)) == size
        assert max(map(len, pieces)) <= PIECE


@pytest.mark.parametrize(
    ("value", "coding"), [("gzip", "gzip"), ("Deflate ", "deflate"), ("br", None), ("gzip, deflate", None)]
)
def test_answers_are_compressed_for_who_names_one_coding(app: Any, value: str, coding: str | None) -> None:
    """HTTP libraries send a list of codings by themselves."""
    body, headers = binary(1000)
    plain = ask(app, "POST", SMALL, body, headers)
    packed = ask(app, "POST", SMALL, body, {**headers, "accept-encoding": value})
    assert packed.headers.get("content-encoding") == coding
    unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[coding]
    assert unpack(packed.body) == plain.body
    length = "inference-header-content-length"
    assert packed.headers[length] == plain.headers[length]


def test_errors_are_never_compressed(app: Any) -> None:
    """tritonclient reads errors as they come."""
    assert ask(app, "POST", SMALL, b"{", {"accept-encoding": "gzip"}).error


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "pause"), [(10, 1.0), (1, 0.01)], ids=["pauses too long", "drips"])
def test_a_body_that_comes_too_slowly(models: EchoRepository, size: int, pause: float) -> None:
    """What drips never pauses, and would hold its room for hours."""
    body, headers = binary(1000)
    parts = in_chunks(body, size)
    headers["content-length"] = str(len(body))
    reply = ask(make_app(models, PATIENCE), "POST", SMALL, parts, headers, pause=pause)
    assert reply.status == 408
    assert "too slowly" in reply.error
    assert reply.headers["connection"] == "close"
    assert models.model("small").held == 0
    assert reply.chunks_read < len(parts)


def test_time_that_we_need_is_not_the_clients(models: EchoRepository) -> None:
    """What inflates for longer than a body may pause was sent in time."""
    body, headers = infer_body(("x", "UINT8", [30 << 20], bytes(30 << 20)))
    headers["content-encoding"] = "gzip"
    app = make_app(models, HttpOptions(idle_seconds=0.05))
    assert ask(app, "POST", "/v2/models/echo/infer", gzip.compress(body, 1), headers).status == 200
