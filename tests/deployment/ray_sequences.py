"""Sequences on a Ray cluster that loses a replica: `python -m tests.deployment.ray_sequences FOLDER`.

Prints how many began, and how many were lost with the replica.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import urllib3

import exportkit
from tests.deployment.observed_replica import Journal
from tests.deployment.ray_cluster import deploy, two_nodes
from tests.deployment.stepping import LostError, Steps
from tests.runtime import stateful

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
