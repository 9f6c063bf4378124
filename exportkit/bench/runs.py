"""One run: the machine, the copy limit, the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone

import torch

from exportkit import __version__
from exportkit.bench.machine import describe
from exportkit.bench.results import FORMAT_VERSION, Results, Row
from exportkit.bench.timing import copy_rate
from exportkit.export.placement import usable_device
from exportkit.export.provenance import provenance

Rows = Callable[[torch.device, float], Iterator[Row]]


def run(rows: Rows, *, device: str, command: str, threads: int | None, progress: Callable[[str], None]) -> Results:
    """Measures the copy limit, then whatever `rows` measures with it.

    Args:
        rows: (device, GB/s of a large copy) -> rows.
        device: "auto" is CUDA where there is a device.
        command: For the record.
        threads: Of torch on the CPU; as many as it has by default.
        progress: Told what is about to be done.

    Raises:
        HostError: There is no such device here.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    on = usable_device(name, without_cuda="Give --device cpu, or run it on a machine that has a GPU.")
    with _ready(on, threads):
        machine = describe(on)  # before the work adds to the machine's load
        if on.type == "cpu" and machine.load > machine.cores / 2:
            progress(f"this machine is busy, which shows in what follows: its load is {machine.load} already")
        progress("measuring the copy limit")
        rate = copy_rate(on)
        found = tuple(rows(on, rate))
        origin = provenance()
    return Results(
        format_version=FORMAT_VERSION,
        exportkit=__version__,
        commit=origin.commit and origin.commit + "+" * bool(origin.dirty),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        machine=machine,
        copy_gb_s=rate,
        rows=found,
    )


@contextmanager
def _ready(device: torch.device, threads: int | None) -> Iterator[None]:
    """The device and a stream of our own, since the default stream cannot be captured; the threads asked for."""
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
