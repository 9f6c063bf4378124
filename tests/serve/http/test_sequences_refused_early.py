"""A sequence that cannot begin is refused before its tensors come; one whose answer cannot be written ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.protocol.inference import SequenceStart, SequenceStep
from tests.serve.http.asking import ask, infer_body
from tests.serve.http.doubles import FakeRepository, Remembers
from tests.serve.page.in_thread import Site, served

LARGE = 8 << 20
PATH = "/v2/models/remembers/infer"
START = {"sequence_id": 7, "sequence_start": True}


@pytest.fixture
def model() -> Remembers:
    return Remembers("remembers", {"x": ("FP32", [-1])}, LARGE)


@pytest.fixture
def full(model: Remembers) -> Remembers:
    model.full = True
    return model


def app_of(model: Remembers, **more: Any) -> Any:
    return make_app(FakeRepository(model), HttpOptions(linger_seconds=0.05, **more))


def large(parameters: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    return infer_body(("x", "FP32", [LARGE // 4], bytes(LARGE)), parameters=parameters)


def pieces(body: bytes, size: int) -> list[bytes]:
    return [body[place : place + size] for place in range(0, len(body), size)]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [50, 60_000])
def test_of_a_body_that_is_refused_only_the_beginning_is_read(full: Remembers, chunked: bool, size: int) -> None:
    body, headers = large(START)
    told = headers if chunked else headers | {"content-length": str(len(body))}
    reply = ask(app_of(full), "POST", PATH, pieces(body, size), told, chunked=chunked)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert "as many sequences as there may be" in reply.error
    assert reply.bytes_read <= int(headers["inference-header-content-length"]) + size
    assert full.starts == [SequenceStart((7,), shapes=(("x", (LARGE // 4,)),))]
    assert (full.answered, full.held) == (0, 0)


@pytest.mark.parametrize(
    "parameters",
    [
        {"sequence_id": 7},  # it goes on
        {"sequence_id": 7, "sequence_end": True},
        {"sequence_id": "known", "sequence_start": True},  # in its own place
        {},
    ],
)
def test_what_begins_no_further_sequence_is_read(full: Remembers, parameters: dict[str, Any]) -> None:
    reply = ask(app_of(full), "POST", PATH, *large(parameters))
    assert reply.status == 200
    assert full.answered == 1


def test_a_method_is_named_before_the_tensors_come(model: Remembers) -> None:
    assert ask(app_of(model), "POST", PATH, *large({**START, "method": "push"})).status == 200
    assert [each.method for each in model.starts] == ["push"]


def test_json_that_is_wrong_is_refused_before_the_tensors_come(model: Remembers) -> None:
    body, headers = large({"sequence_id": -1, "sequence_start": True})
    reply = ask(app_of(model), "POST", PATH, pieces(body, 60_000), headers | {"content-length": str(len(body))})
    assert reply.status == 400
    assert reply.bytes_read <= 60_000


@pytest.mark.parametrize("session", ["7", "a%20text", "", "9" * 40, "%ff", "known"])
@pytest.mark.parametrize("said", ["true", "false", "True"])
def test_a_header_says_it_before_all_of_the_body(full: Remembers, session: str, said: str) -> None:
    headers = {"x-session-start": said, "x-session-id": session, "content-length": str(LARGE)}
    reply = ask(app_of(full), "POST", PATH, [b"{", b"}"], headers)
    if said != "true" or session == "known":
        assert reply.status == 400  # the body was read, and is none
        assert reply.bytes_read
        return
    assert (reply.status, reply.bytes_read) == (429, 0)
    ids = {"7": ("7", 7), "a%20text": ("a text",), "": (), "9" * 40: ("9" * 40,), "%ff": ("\ufffd",)}
    assert full.starts == [SequenceStart(ids[session])]


def test_small_bodies_are_not_read_in_two_parts(model: Remembers) -> None:
    data = np.arange(3, dtype=np.float32).tobytes()
    assert ask(app_of(model), "POST", PATH, *infer_body(("x", "FP32", [3], data), parameters=START)).status == 200
    assert model.starts == []


@pytest.fixture
def remembering(model: Remembers) -> Iterator[Site]:
    """A real server, which receives bodies into memory by itself."""
    with served(app_of(model)) as site:
        yield site


def head(body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode()


@pytest.mark.parametrize("cut", [10, None])
def test_a_server_answers_a_client_that_has_sent_only_the_json(
    full: Remembers, remembering: Site, cut: int | None
) -> None:
    body, headers = large(START)
    length = int(headers["inference-header-content-length"])
    with socket.create_connection(("127.0.0.1", remembering.port), timeout=60) as client:
        client.sendall(head(body, headers) + body[:cut])
        if cut:
            time.sleep(0.05)
            client.sendall(body[cut:length])
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize("cuts", [(0,), (10,), (100, 5000), (300_000,)])
def test_a_body_that_is_read_in_two_parts_arrives_as_it_was_sent(
    model: Remembers, remembering: Site, cuts: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).random(LARGE // 4, np.float32)
    body, headers = infer_body(("x", "FP32", [LARGE // 4], values.tobytes()), parameters=START)
    with socket.create_connection(("127.0.0.1", remembering.port), timeout=60) as client:
        for again in range(2):  # the connection is good for another request
            message = head(body, headers) + body
            for start, end in zip((0, *cuts), (*cuts, len(message))):
                client.sendall(message[start:end])
                time.sleep(0.02)
            received = b""
            while not received.endswith(values[-64:].tobytes()):
                received += client.recv(1 << 20)
            assert received.startswith(b"HTTP/1.1 200 ")
            assert received[-LARGE:] == values.tobytes()
            assert len(model.starts) == again + 1


def test_an_answer_that_cannot_be_written_ends_its_sequence(model: Remembers) -> None:
    nan = np.array([np.nan], np.float32).tobytes()
    body, headers = infer_body(("x", "FP32", [1], nan), parameters={"sequence_id": 7, "binary_data_output": False})
    reply = ask(app_of(model), "POST", PATH, body, headers)
    assert (reply.status, "NaN" in reply.error) == (400, True)
    assert model.given_up == [SequenceStep(7)]
    body, headers = infer_body(("x", "FP32", [1], nan), parameters={"binary_data_output": False})
    assert ask(app_of(model), "POST", PATH, body, headers).status == 400
    assert len(model.given_up) == 1
