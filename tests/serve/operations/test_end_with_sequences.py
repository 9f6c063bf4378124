"""A server ends without the sequences and the streams that clients left open."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.serve.operations.sequence_server import given, recorder, which
from tests.serve.operations.server_processes import Launcher

__all__ = ["recorder"]


@pytest.mark.parametrize("way", ["HTTP", "a stream"])
def test_what_clients_left_open_does_not_hold_up_the_end(launcher: Launcher, recorder: Path, way: str):
    server = launcher.start(recorder, "--sequence-finish", 0).wait_until_ready()
    if way == "HTTP":
        client: Any = tritonclient.http.InferenceServerClient("{}:{}".format(*server.address))
        client.infer("recorder.push", given(tritonclient.http, 0, 0), **which(7, 0))
    else:
        answers: Queue[Any] = Queue()
        client = tritonclient.grpc.InferenceServerClient(server.started["grpc"])
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("recorder.push", given(tritonclient.grpc, 0, 0), **which(7, 0))
        assert answers.get(timeout=60)[1] is None
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 20  # of the 30 seconds that accepted requests may take
    client.close()
