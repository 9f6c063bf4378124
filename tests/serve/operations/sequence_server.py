"""A server of a small model with state, and what sessions answer to the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

import exportkit
from tests.runtime import stateful
from tests.serve.operations.server_processes import Launcher, ServerProcess

ONE, OTHER = ("one-of-the-clients-keys", "the-other-client-has-this")
STEPS = 6
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """push and peek have state, embed has none; there is no default method."""
    return stateful.write(tmp_path_factory.mktemp("sequences") / "recorder.pt2")


@pytest.fixture(scope="module")
def server(launcher: Launcher, recorder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It has two keys, and takes 40 sequences."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{ONE}\n{OTHER}\n")
    keys.chmod(0o600)
    process = launcher.start(recorder, "--api-keys", keys, "--max-sequences", 40, "--sequence-finish", 0)
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="module")
def expected(recorder: Path) -> dict[int, list[Array]]:
    """What sessions answer to the steps of sequences, by their seeds."""
    found = {}
    with exportkit.load(recorder) as model:
        for seed in range(32):
            with model.session(batch=2) as session:
                found[seed] = [session.push(torch.from_numpy(rows(seed, step))).numpy() for step in range(STEPS)]
    return found


def rows(seed: int, step: int) -> Array:
    return np.random.default_rng([seed, step]).random((2, stateful.WIDTH), np.float32)


def given(module: Any, seed: int, step: int) -> list[Any]:
    return inputs(module, x=rows(seed, step))


def inputs(module: Any, **values: Array) -> list[Any]:
    found = [module.InferInput(name, list(value.shape), "FP32") for name, value in values.items()]
    for tensor, value in zip(found, values.values()):
        tensor.set_data_from_numpy(value)
    return found


def which(sequence: int | str, step: int, last: int = STEPS - 1) -> dict[str, Any]:
    return {"sequence_id": sequence, "sequence_start": step == 0, "sequence_end": step == last}


def bearer(key: str = ONE) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def clients(server: ServerProcess) -> dict[Any, str]:
    return {
        tritonclient.http: "{}:{}".format(*server.address),
        tritonclient.grpc: server.started["grpc"],
    }
