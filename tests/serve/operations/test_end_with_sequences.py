"""A server ends without those sequences that it does not let go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tritonclient.http

from tests.serve.operations.sequence_server import given, recorder, which
from tests.serve.operations.server_processes import Launcher

__all__ = ["recorder"]


@pytest.mark.parametrize("open_connection", [False, True], ids=["closed", "open"])
def test_an_open_sequence_does_not_hold_up_the_end(launcher: Launcher, recorder: Path, open_connection: bool):
    server = launcher.start(recorder, "--sequence-finish", 0).wait_until_ready()
    client = tritonclient.http.InferenceServerClient("{}:{}".format(*server.address))
    client.infer("recorder.push", given(tritonclient.http, 0, 0), **which(7, 0))
    if not open_connection:
        client.close()
    began = time.monotonic()
    assert server.stop() == 0
    print("SECONDS", time.monotonic() - began)
    client.close()
    assert time.monotonic() - began < 5
