"""Runs a benchmark: describes the machine, and measures the rows and the copy limit."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from exportkit import __version__
from exportkit.bench.results import FORMAT_VERSION, Machine, Results, Row
from exportkit.bench.timing import copy_rate
from exportkit.export.models.placement import usable_device
from exportkit.export.provenance import provenance
from exportkit.progress import Progress

Rows = Callable[[torch.device, Callable[[], float]], Iterator[Row]]


def run(rows: Rows, *, device: str, command: str, threads: int | None, progress: Progress) -> Iterator[Results]:
    """Yields the results so far after each row, because later rows may fail. HostError: the device is not here.

    `rows` measures them: (device, rate) -> rows. `rate` returns the GB/s of a large copy; its first call measures that,
    which takes seconds: check everything before. The device "auto" is CUDA if there is a CUDA device.
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
        found: list[Row] = []
        for row in rows(on, rate):
            found.append(row)
            yield Results(
                format_version=FORMAT_VERSION,
                exportkit=__version__,
                commit=origin.commit and origin.commit + "+" * bool(origin.dirty),
                created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                command=command,
                machine=machine,
                copy_gb_s=rate(),
                rows=tuple(found),
            )


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


def describe(device: torch.device) -> Machine:
    """Returns names, versions and threads of the CPU and of `device`."""
    cpu, gpu = _cpu_name(), torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return Machine(
        device=gpu or f"{cpu}, {threads} thread{'s' * (threads != 1)}",
        cpu=cpu,
        cores=cores,
        threads=threads,
        load=round(os.getloadavg()[0], 2),
        gpu=gpu,
        driver=_driver() if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
    )


def _cpu_name() -> str:
    """Returns the CPU's model, and the widest instruction set that torch's kernels use."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1].strip() if found else platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None
