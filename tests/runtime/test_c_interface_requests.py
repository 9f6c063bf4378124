"""exportkit.h, several requests in one call: each has the answers of its own call, whatever the others are."""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runtime import c_interface, stateful
from tests.runtime.c_interface import Refused, view
from tests.runtime.c_requests import Ask, Gathered, run_requests
from tests.runtime.c_structures import Answers, DataType, Request, RequestInput
from tests.serve.engine import rows, ticker

MODEL_RUN, BUSY, CLOSED, USAGE, INPUT, MEMORY = 102, 104, 106, 200, 201, 407


def opened(library: c_interface.Library, package: Path, cache: Path, **options: object) -> c_interface.Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPORTKIT_CACHE", str(cache))
        return library.open(package, **options)


@pytest.fixture(scope="module")
def model(
    c_library: c_interface.Library, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[c_interface.Model]:
    folder = tmp_path_factory.mktemp("rows")
    package = rows.write(folder / "rows.pt2", {**rows.example(4), "coupling": torch.zeros(4, 1)})
    with opened(c_library, package, folder / "cache", runners=4) as found:
        yield found


def example(count: int, coupling: float = 0.0) -> list[np.ndarray]:
    return [bits(tensor) for tensor in rows.example(count, coupling).values()]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view("V2") if tensor.dtype is torch.bfloat16 else tensor.numpy()


def test_smoke(model):
    print(run_requests(model, [Ask(example(2)), Ask(example(3))], 8))
