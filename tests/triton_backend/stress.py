"""Finds out whether a Triton survives sequences with several outstanding steps on a stream.

    python -m tests.triton_backend.stress speech.pt2 --starts 20 --outstanding 2

Triton 24.10 did not where a step takes a millisecond, as that of examples/speech, as long as the backend answered
before it gave the request back: it used a queued request that was freed, also with one outstanding step, and with a
backend that does nothing. EXPORTKIT_TRITON names another server to try. Without a package it takes that of the tests,
whose steps are short.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.serve.engine import ticker
from tests.triton_backend.triton_server import Triton, given

_SEQUENCE_STEPS = 50


class Load:
    """Steps of sequences on a stream of their own, as fast as they are answered."""

    def __init__(self, server: Triton, model: str, sequences: range, outstanding: int) -> None:
        self._server, self._model = server, model
        zeros = {each["name"]: torch.zeros(1, *each["dims"]) for each in server.config(model)["input"]}
        self._inputs = given(tritonclient.grpc, zeros)
        self._free = {sequence: threading.Semaphore(outstanding) for sequence in sequences}
        self.answers, self.errors = 0, list[str]()

    def run(self, seconds: float) -> None:
        with contextlib.suppress(InferenceServerException):  # the server died
            self._run(seconds)

    def _run(self, seconds: float) -> None:
        end, turn = time.monotonic() + seconds, 0
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self._server.grpc_port}")
        client.start_stream(self._answered)
        while time.monotonic() < end and self._server.process.poll() is None:
            for sequence, free in self._free.items():
                free.acquire(timeout=10)
                client.async_stream_infer(
                    self._model,
                    self._inputs,
                    request_id=str(sequence),
                    sequence_id=sequence,
                    sequence_start=turn == 0,
                    sequence_end=turn == _SEQUENCE_STEPS - 1,
                )
            turn = (turn + 1) % _SEQUENCE_STEPS
        client.stop_stream()

    def _answered(self, result: Any, error: Any) -> None:
        if error is not None:
            self.errors.append(str(error))
            return
        self.answers += 1
        self._free[int(result.get_response().id)].release()


def crashes(folder: Path, package: Path | None, seconds: float, outstanding: int) -> bool:
    """Starts a server, and says whether it died of the load."""
    server = Triton(folder)
    try:
        model = server.add("stressed", package or ticker.write(folder / "ticker.pt2"))
        loads = [Load(server, model, range(1000 * stream, 1000 * stream + 50), outstanding) for stream in range(1, 5)]
        threads = [threading.Thread(target=load.run, args=(seconds,), daemon=True) for load in loads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 15)
        died = server.process.poll() is not None
        if died:
            print(server.log[server.log.rfind("Signal (") :])
        errors = [error for load in loads for error in load.errors]
        print(
            f"answers {sum(load.answers for load in loads)}, errors {len(errors)} {errors[:1]}, died {died}", flush=True
        )
        return died
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="?", type=Path, help="a package with state in rows")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--outstanding", type=int, default=2, help="steps of a sequence that are not answered")
    options = parser.parse_args()
    died = 0
    for _ in range(options.starts):
        with tempfile.TemporaryDirectory(prefix="triton-stress-") as folder:
            died += crashes(Path(folder), options.package, options.seconds, options.outstanding)
    print(f"{died} of {options.starts} servers died")


if __name__ == "__main__":
    main()
