"""Sequences of clients that are careless, hostile or gone, over HTTP, gRPC and shared memory."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

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
