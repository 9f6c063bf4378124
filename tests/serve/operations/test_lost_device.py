"""A GPU that is broken for the process: the server says so, answers what waits, and ends for another to start."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from tests.serve.operations.asking_tiny import INFER, body
from tests.serve.operations.server_processes import Launcher

# Simulated: once the file is there, a call takes a second and makes an illegal access, after which all of CUDA fails.
BREAKS = """
import os, time, torch
from exportkit.errors import ModelRunError
from exportkit.serve.engine import model_replica
TEXT = "CUDA error: an illegal memory access was encountered"
answered = model_replica.ModelReplica.answered
def breaking(shared, ask):
    if not os.path.exists({flag!r}):
        return answered(shared, ask)
    time.sleep(1)
    shared.device = torch.device("cuda", 0)
    raise ModelRunError("the compiled model failed: " + TEXT)
def broken(device=None):
    raise RuntimeError(TEXT + chr(10) + "CUDA kernel errors might be asynchronously reported")
model_replica.ModelReplica.answered, torch.cuda.synchronize = breaking, broken
"""


def test_what_waits_is_answered_and_the_process_ends_with_its_code(
    launcher: Launcher, tiny_package: Path, tmp_path: Path
) -> None:
    flag = tmp_path / "break"
    options = ("--max-batch", "1", "--drain-timeout", "60")
    server = launcher.start(tiny_package, *options, before=BREAKS.format(flag=str(flag)))
    server.wait_until_ready()
    assert server.ask(INFER, body())[0] == 200
    assert server.ask("/v2/health/live")[0] == 200
    flag.touch()
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        status, _, content = server.ask(INFER, body())
        answers.append((status, json.loads(content)["error"]))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert server.wait() == 6
    for thread in threads:
        thread.join()
    assert len(answers) == len(threads)
    failed = [error for status, error in answers if status == 500]
    assert 1 <= len(failed) <= 2  # two runners may find out at the same time
    assert all("the compiled model failed: CUDA error: an illegal memory access" in error for error in failed)
    assert sorted({status for status, _ in answers}) == [500, 503]
    assert all("cuda:0 is lost to this process" in error for status, error in answers if status == 503)
    lost = "cuda:0 is lost to this process: CUDA error: an illegal memory access was encountered"
    assert f"error: {lost}; what waits is answered with 503" in server.report
    assert server.report[-1] == f"error: {lost}. A new process can use it; `--isolate` starts one by itself"
