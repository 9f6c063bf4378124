"""Requests in threads without Python: each answer is that of `run_requests`, and so is each error."""

from __future__ import annotations

import gc
import os
import select
import time
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import InputError, ModelClosedError, ModelRunError, UsageError
from exportkit.runtime.background import Background
from tests.runtime import meeting
from tests.runtime.isolation import equal

FAILS = -1.0  # as x's first element


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return meeting.write(tmp_path_factory.mktemp("meeting") / "meeting.pt2")


def drawn(rows: int, first: float = 0.0) -> list[torch.Tensor]:
    x = torch.rand(rows, 8)
    x[0, 0] = first
    return [x, torch.rand(rows, 8, 2)]


def threads_of(model: exportkit.Model, count: int = 1) -> Background:
    background = model.background(count)
    assert background is not None
    return background


def all_of(background: Background, count: int) -> dict[int, object]:
    found: dict[int, object] = {}
    while len(found) < count:
        assert select.select([background.descriptor], [], [], 30)[0]
        found.update(background.ended())
    assert not select.select([background.descriptor], [], [], 0)[0]
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_answers_are_those_of_run_requests(package: Path, threads: int):
    with exportkit.load(package) as model:
        background = threads_of(model, threads)
        asked = {background.begin(requests, [3, 0]): requests for requests in [[drawn(1)], [drawn(2), drawn(3)]] * 20}
        found = all_of(background, len(asked))
        for number, requests in asked.items():
            expected = model.run_requests(requests, [3, 0])
            assert equal(found[number].outputs, expected.outputs)
            assert found[number].wait_seconds >= 0 < found[number].run_seconds


def test_a_run_that_fails_harms_no_other(package: Path):
    with exportkit.load(package) as model:
        background = threads_of(model)
        bad, good = [drawn(1, FAILS)], [drawn(1)]
        first, second = background.begin(bad, [0]), background.begin(good, [0])
        found = all_of(background, 2)
        with pytest.raises(ModelRunError) as error:
            model.run_requests(bad, [0])
        assert (type(found[first]), str(found[first])) == (ModelRunError, str(error.value))
        assert equal(found[second].outputs, model.run_requests(good, [0]).outputs)


def test_what_the_package_does_not_allow_is_refused_before_it_begins(package: Path):
    with exportkit.load(package) as model:
        background = threads_of(model)
        with pytest.raises(InputError):
            background.begin([drawn(1)[:1]], [0])
        with pytest.raises(UsageError):
            background.begin([drawn(1)], [9])
        assert background.ended() == []
    with pytest.raises(ModelClosedError):
        background.begin([drawn(1)], [0])


def test_what_began_runs_to_its_end_when_the_model_is_closed(package: Path):
    with exportkit.load(package) as model:
        background = threads_of(model)
        asked = [drawn(2) for _ in range(50)]
        numbers = [background.begin([each], [0]) for each in asked]
    background.finish()
    found = all_of(background, 50)
    assert all(equal(found[n].outputs, [meeting.answer(*each)[0]]) for n, each in zip(numbers, asked))


def open_now() -> tuple[int, int]:
    """The descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_threads_and_descriptors_end(package: Path):
    with exportkit.load(package) as model:
        gc.collect()  # those of other tests

        def more_than(before: tuple[int, int]) -> bool:
            return any(now > then for now, then in zip(open_now(), before))

        before, end = open_now(), time.monotonic() + 30
        for _ in range(20):
            background = threads_of(model, 4)
            background.begin([drawn(1)], [0])
            del background
            gc.collect()
        # /proc lists a thread for a while after its end. Threads of other tests may end meanwhile.
        while more_than(before) and time.monotonic() < end:
            time.sleep(0.01)
        assert not more_than(before)


def test_a_worker_process_and_torchs_own_binding_have_none(package: Path, monkeypatch: pytest.MonkeyPatch):
    with exportkit.load(package, isolate=True) as model:
        assert model.background(1) is None
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "python")
    with exportkit.load(package) as model:
        assert model.background(1) is None
