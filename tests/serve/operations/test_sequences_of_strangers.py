"""Sequences of clients that are careless, hostile or gone, over HTTP, gRPC and shared memory."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.serve.operations import sequence_server
from tests.serve.operations.sequence_server import ONE, OTHER, bearer, clients, given, which
from tests.serve.operations.server_processes import ServerProcess

recorder, server, expected = sequence_server.recorder, sequence_server.server, sequence_server.expected  # fixtures
both = pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])
PUSH = "/v2/models/recorder.push/infer"


def counted(server: ServerProcess) -> dict[str, float]:
    """The metrics of sequences."""
    _, _, content = server.ask("/metrics", headers=bearer())
    lines = [line.rsplit(" ", 1) for line in content.decode().splitlines() if line.startswith("exportkit_sequences")]
    return {name: float(value) for name, value in lines}


def there(server: ServerProcess) -> float:
    return counted(server)['exportkit_sequences{model="recorder"}']


@both
def test_a_number_its_text_and_another_keys_are_different_sequences(server: ServerProcess, expected, protocol):
    names = [(7, ONE), ("7", ONE), (7, OTHER), ("7", OTHER), ((1 << 63) - 1, ONE), ("9" * 128, ONE), ("\u202eé", ONE)]
    with protocol.InferenceServerClient(clients(server)[protocol]) as client:
        for step in range(3):
            for seed, (sequence, key) in enumerate(names):
                tensors = given(protocol, seed, step)
                found = client.infer("recorder.push", tensors, headers=bearer(key), **which(sequence, step, 2))
                np.testing.assert_array_equal(found.as_numpy("0"), expected[seed][step])
    assert there(server) == 0


@pytest.mark.parametrize(
    "sequence",
    ["-1", "1e3", "7.0", "true", "null", "[7]", "{}", str(1 << 64), "9" * 400, '"' + "x" * 129 + '"', "0", '""'],
)
def test_an_id_that_is_none_begins_nothing(server: ServerProcess, sequence: str):
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [0.0] * 8}
    text = f'{{"inputs": [{json.dumps(tensor)}], "parameters": {{"sequence_id": {sequence}, "sequence_start": true}}}}'
    status, _, answer = server.ask(PUSH, text.encode(), bearer())
    assert (status, b"sequence_id" in answer) == (400, True)
    assert there(server) == 0


@both
@pytest.mark.parametrize("sequence", [-1, "x" * 129])
def test_clients_cannot_send_such_ids(server: ServerProcess, protocol, sequence):
    client = protocol.InferenceServerClient(clients(server)[protocol])
    with client, pytest.raises(InferenceServerException, match="`sequence_id`"):
        client.infer("recorder.push", given(protocol, 0, 0), headers=bearer(), **which(sequence, 0))
    assert there(server) == 0


@contextmanager
def full(server: ServerProcess) -> Iterator[None]:
    """While it has as many sequences as it may."""
    with tritonclient.http.InferenceServerClient(clients(server)[tritonclient.http]) as client:

        def ask(step: int) -> None:
            for sequence in range(1, 41):
                tensors = given(tritonclient.http, 0, step)
                client.infer("recorder.push", tensors, headers=bearer(), **which(sequence, step, 1))

        ask(0)
        yield
        ask(1)


def test_who_says_in_a_header_that_a_sequence_begins_is_refused_without_a_body(server: ServerProcess):
    key = f"authorization: Bearer {ONE}\r\n"
    head = f"POST {PUSH} HTTP/1.1\r\nhost: h\r\n{key}content-length: 100\r\nx-session-start: true\r\n"
    with full(server):
        for named in ("", "x-session-id: 41\r\n", "x-session-id: text\r\n", "expect: 100-continue\r\n"):
            with socket.create_connection(server.address, timeout=60) as client:
                client.sendall((head + named + "\r\n").encode())
                assert client.recv(65536).startswith(b"HTTP/1.1 429 ")
        with socket.create_connection(server.address, timeout=60) as client:  # this one would begin in its own place
            client.sendall((head + "x-session-id: 40\r\nexpect: 100-continue\r\n\r\n").encode())
            assert client.recv(65536).startswith(b"HTTP/1.1 100 ")


def test_who_says_it_in_metadata_is_refused_without_a_message(server: ServerProcess):
    def never() -> Iterator[bytes]:
        time.sleep(30)
        yield b""

    with full(server), grpc.insecure_channel(server.started["grpc"]) as channel:
        infer = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        metadata = [*bearer().items(), ("x-session-start", "true"), ("x-session-id", "41")]
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as refused:
            infer(never(), metadata=metadata, timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 40 may be" in refused.value.details()
        assert time.monotonic() - began < 15


def test_of_clients_that_begin_together_as_many_do_as_may(server: ServerProcess):
    address = clients(server)[tritonclient.http]

    def ask(sequence: int) -> str:
        with tritonclient.http.InferenceServerClient(address) as client:
            try:
                client.infer("recorder.push", given(tritonclient.http, 0, 0), headers=bearer(), **which(sequence, 0))
            except InferenceServerException as error:
                return str(error.status())
            return "200"

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(1, 61)))
        assert (found.count("200"), found.count("429")) == (40, 20)
        begun = [sequence for sequence, status in enumerate(found, 1) if status == "200"]

        def end(sequence: int) -> None:
            with tritonclient.http.InferenceServerClient(address) as client:
                tensors = given(tritonclient.http, 0, 1)
                client.infer("recorder.push", tensors, headers=bearer(), sequence_id=sequence, sequence_end=True)

        list(pool.map(end, begun))
    assert there(server) == 0


def test_a_client_that_vanishes_with_its_body_begins_nothing(server: ServerProcess):
    parameters = {"sequence_id": 5, "sequence_start": True}
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [0.0] * 8}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    head = f"POST {PUSH} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {ONE}\r\ncontent-length: {len(body)}\r\n\r\n"
    before = counted(server)
    for cut in (0, 20, len(body) - 1):
        with closing(socket.create_connection(server.address, timeout=60)) as client:
            client.sendall(head.encode() + body[:cut])
    server.until(lambda: len([line for line in server.access_log if line["status"] == 499]) >= 3)
    assert counted(server) == before
