"""Sequences on a Ray cluster that loses a replica: `python -m tests.deployment.ray_sequences FOLDER`.

Prints how many began, and how many were lost with the replica.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import urllib3
from tritonclient.http import InferenceServerClient, InferInput

import exportkit
from tests.deployment.observed_replica import Journal
from tests.deployment.ray_cluster import deploy, two_nodes
from tests.runtime import stateful

_SECONDS = 60.0


class LostError(Exception):
    """The sequence is lost: nobody has it, or nobody knows whether a step ran."""


class Steps:
    """A sequence of requests with one input `x`, whose answers have one output `0`. One thread uses it.

    It sends them through a proxy, as docs/scale.md says that clients do.
    """

    def __init__(self, url: str, model: str, pool: urllib3.PoolManager) -> None:
        self._url, self._pool = f"{url}/v2/models/{model}/infer", pool
        self._id = secrets.token_hex(16)
        self._begins = True

    def infer(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sends the next step. What the server says that it did not run, and first steps, are sent again."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            try:
                answer = self._sent(x)
            except urllib3.exceptions.HTTPError as error:
                self._may_have_run(str(error))
                continue
            if answer.status == 200:
                self._begins = False
                length = int(answer.headers["inference-header-content-length"])
                found = InferenceServerClient.parse_response_body(answer.data, header_length=length).as_numpy("0")
                assert found is not None
                return found
            if answer.status == 409:
                raise LostError(answer.data.decode())
            if answer.status not in (429, 503) or not _is_the_servers(answer.data):
                self._may_have_run(answer.data.decode())
            time.sleep(0.1)
        raise TimeoutError(self._url)

    def _sent(self, x: np.ndarray[Any, Any]) -> urllib3.BaseHTTPResponse:
        given = InferInput("x", list(x.shape), "FP32")
        given.set_data_from_numpy(x)
        which = {"sequence_id": self._id, "sequence_start": self._begins}
        body, length = InferenceServerClient.generate_request_body([given], **which)
        headers = {"Inference-Header-Content-Length": f"{length}", "x-session-id": quote(self._id)}
        return self._pool.request("POST", self._url, body=body, headers=headers, retries=False, timeout=_SECONDS)

    def _may_have_run(self, reason: str) -> None:
        """Nobody knows whether the step ran. A first one begins under another id."""
        if not self._begins:
            raise LostError(f"nobody knows whether the step ran: {reason}")
        self._id = secrets.token_hex(16)


def _is_the_servers(content: bytes) -> bool:
    """Whether a server of the protocol says it, and no proxy."""
    try:
        return "error" in json.loads(content)
    except ValueError:
        return False


PORT = 18701


def main() -> None:
    folder = Path(sys.argv[1])
    package = stateful.write(folder / "recorder.pt2")
    (folder / "journal").touch()
    journal = Journal(folder / "journal")
    with exportkit.load(package) as model, model.session(batch=1) as session:
        right = [session.push(torch.from_numpy(row(step))).numpy() for step in range(stateful.ROWS)]
    with two_nodes(folder, PORT):
        deploy(folder, {"sequences": {"idle_seconds": 600}})
        pool = urllib3.PoolManager()
        begun = [Steps(f"http://127.0.0.1:{PORT}", "recorder.push", pool) for _ in range(30)]
        assert lost_in(begun, range(2), right) == set()
        os.kill(journal.living().pop(), signal.SIGKILL)
        print(json.dumps([len(begun), len(lost_in(begun, range(2, 3), right))]))


def row(step: int) -> np.ndarray[Any, Any]:
    return np.full((1, stateful.WIDTH), 0.1 * (step + 1), np.float32)


def lost_in(sequences: list[Steps], steps: range, right: list[np.ndarray[Any, Any]]) -> set[Steps]:
    """Sends steps of sequences in turns, and returns those that were lost."""
    lost = set()
    for step in steps:
        for sequence in sequences:
            try:
                answer = sequence.infer(row(step))
            except LostError:
                lost.add(sequence)
            else:
                np.testing.assert_array_equal(answer, right[step])
    return lost


if __name__ == "__main__":
    main()
