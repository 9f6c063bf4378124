"""Runs a benchmark: describes the machine, and measures the rows and the copy limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone

import msgspec
import torch

from exportkit import __version__
from exportkit.bench.machine import describe
from exportkit.bench.results import FORMAT_VERSION, Results, Row
from exportkit.bench.timing import copy_rate
from exportkit.export.placement import usable_device
from exportkit.export.provenance import provenance

Rows = Callable[[torch.device, Callable[[], float]], Iterator[Row]]


def run(
    rows: Rows,
    *,
    device: str,
    command: str,
    threads: int | None,
    progress: Callable[[str], None],
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measures the rows.

    Args:
        rows: A function that measures the rows: (device, rate) -> rows. `rate` returns the GB/s of a large copy, which
            it measures once. So what is refused is refused before that.
        device: The device's name. "auto" is CUDA if there is a CUDA device.
        command: The command line, which the results record.
        threads: The number of torch's CPU threads. None: torch's default.
        progress: Called with a description of each step.
        save: Called after each row with the results so far: later rows may fail, or take too long.

    Raises:
        HostError: This machine does not have the device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    on = usable_device(name, without_cuda="Give --device cpu, or use a machine with a GPU.")
    with _ready(on, threads):
        machine = describe(on)  # before this run adds to the load
        if on.type == "cpu" and machine.load > machine.cores / 2:
            progress(f"this machine is busy (load {machine.load}), which affects the results")

        @functools.cache
        def rate() -> float:
            progress("measuring the copy limit")
            return copy_rate(on)

        origin = provenance()
        results = Results(
            format_version=FORMAT_VERSION,
            exportkit=__version__,
            commit=origin.commit and origin.commit + "+" * bool(origin.dirty),
            created=_now(),
            command=command,
            machine=machine,
            copy_gb_s=0,
            rows=(),
        )
        for row in rows(on, rate):
            results = msgspec.structs.replace(results, created=_now(), copy_gb_s=rate(), rows=(*results.rows, row))
            save(results)
    return results


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _ready(device: torch.device, threads: int | None) -> Iterator[None]:
    """Sets the device, the threads, and a new stream, because the default stream cannot be captured."""
    before = torch.get_num_threads()
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
