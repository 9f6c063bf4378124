"""What requests and models that are exchanged leave behind is collected."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from exportkit.serve.engine.repository import Repository
from exportkit.serve.process_settings import collect_requests, give_freed_memory_back
from exportkit.serve.protocol.inference import SequenceStep
from tests.serve.engine import ticker
from tests.serve.engine.asking import request, serving, until

KIB_OF_A_LOAD = 8.0  # it was 14 to 200


@pytest.fixture
def frozen() -> Iterator[None]:
    """What is there counts as no garbage, as in a server."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_a_request_leaves_behind_is_collected_soon(frozen):
    class Request:
        itself: Request

    def request_with_a_cycle() -> weakref.ref[Request]:
        one = Request()
        one.itself = one
        return weakref.ref(one)

    collect_requests()
    left = [request_with_a_cycle() for _ in range(5000)]
    assert sum(each() is not None for each in left) < 1000


class _Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{place}", ctypes.c_size_t) for place in range(10)]


def used() -> float:
    """Returns the KiB of memory that this process has for itself: its heap's in use, and all that is not its heap."""
    gc.collect()
    give_freed_memory_back()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    heap = mallinfo()
    lines = Path("/proc/self/status").read_text().splitlines()
    (anonymous,) = (int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    free = heap.field8 / 1024  # what malloc holds between used pieces may come and go
    return max(anonymous - free, heap.field7 / 1024)


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("warm_up", [True, False])
async def test_exchanges_leave_nothing_though_what_was_first_is_frozen(ticker_package, tmp_path, frozen, warm_up):
    path = Path(shutil.copy(ticker_package, tmp_path / "ticker.pt2"))
    numbers = iter(range(1, 1000))

    async def exchanges(repository: Repository, count: int) -> None:
        for number in (next(numbers) for _ in range(count)):
            model = repository.model("ticker")
            for end in (False, True):
                step = SequenceStep(number, start=not end, end=end)
                await model.infer(request(ticker.inputs(number), sequence=step))
            os.utime(path, ns=(number, number))
            await repository.load("ticker", {})
        await until(lambda: not repository._closing)

    async with serving(path, warm_up=warm_up) as repository:
        collect_requests()
        await exchanges(repository, 15)
        before = used()
        await exchanges(repository, 60)
        assert (used() - before) / 60 < KIB_OF_A_LOAD
