"""Describes the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from exportkit.bench.results import Machine


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
