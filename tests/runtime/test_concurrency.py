"""Many threads, mixed shapes, one model: each call gets its own answer, bit for bit, and nothing piles up."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import exportkit
from exportkit.runtime.isolated import IsolatedModel
from tests.runtime import tiny
from tests.runtime.isolation import leaves

THREADS = 16
CALLS = 60  # of each thread

Call = tuple[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(params=[False, True], ids=["here", "isolated"])
def isolate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[1, 4], ids=["1 runner", "4 runners"])
def model(request: pytest.FixtureRequest, tiny_package: Path, isolate: bool) -> Iterator[exportkit.Model]:
    with exportkit.load(tiny_package, runners=request.param, isolate=isolate) as model:
        yield model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For what is about memory: OpenMP's threads take most of a small call's time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls() -> list[Call]:
    """Every shape the package allows, each several times with other values: 48 calls, no two alike."""
    return [tiny.example(batch, gh) for batch in range(1, 5) for gh in range(1, 7) for _ in range(2)]


def test_sixteen_threads_of_mixed_shapes_get_the_serial_answers(model, calls):
    inputs = [[tensor.clone() for tensor in leaves([list(args), kwargs])] for args, kwargs in calls]
    expected = [[leaf.clone() for leaf in leaves(model(*args, **kwargs))] for args, kwargs in calls]
    assert len({answer[0].sum().item() for answer in expected}) == len(calls), "answers must tell calls apart"
    wrong: list[tuple[int, int]] = []
    done = []
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        order = random.Random(number)
        kept = []
        start.wait()
        for _ in range(CALLS):
            index = order.randrange(len(calls))
            args, kwargs = calls[index]
            kept.append((index, leaves(model(*args, **kwargs))))
        # Compared at the end: an answer that a later call overwrote would be found out.
        for index, answer in kept:
            if len(answer) != len(expected[index]) or not all(map(torch.equal, answer, expected[index])):
                wrong.append((number, index))
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(THREADS))
    assert wrong == []
    for (args, kwargs), before in zip(calls, inputs):
        assert all(map(torch.equal, leaves([list(args), kwargs]), before))


def test_memory_is_flat_over_ten_thousand_calls(tiny_package, isolate, calls, one_thread):
    """Of this process and of the worker: what 10,000 calls leave behind is less than a byte a call's tensors hold."""
    with exportkit.load(tiny_package, isolate=isolate) as model:
        processes = [os.getpid()] + ([model.pid] if isinstance(model, IsolatedModel) else [])
        order = random.Random(0)

        def repeat(count: int) -> list[int]:
            for _ in range(count):
                args, kwargs = order.choice(calls)
                model(*args, **kwargs)
            gc.collect()
            return [resident(process) for process in processes]

        before = repeat(2000)  # allocators, OpenMP's threads and the segments have grown to what they need
        after = repeat(10_000)
        grown = [now - then for now, then in zip(after, before)]
        assert all(growth < 4 << 20 for growth in grown), grown  # bytes; a leak of one 512-byte block a call has 5 MB
        assert all(len(os.listdir(f"/proc/{process}/fd")) < 100 for process in processes)


def resident(process: int) -> int:
    """Bytes of memory that a process has to itself."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has no Private_Dirty")
