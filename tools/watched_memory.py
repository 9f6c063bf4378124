"""The memory of a command and its children while it runs: on the host, and on its GPU."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EVERY = 0.1  # seconds
_SHARED_EVERY = 10  # rounds, where no process came or went: what children share costs more to read


class GpuMemory:
    """What is used of the GPUs' memory, by all processes. Without GPUs there is nothing."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            index, _, used = line.partition(",")
            if index.strip().isdigit() and used.strip().isdigit():
                self.used[int(index)] = int(used) << 20

    def close(self) -> None:
        """Ends the reading."""
        if hasattr(self, "_process"):
            self._process.terminate()


@dataclass
class Peaks:
    """The greatest bytes that were seen.

    Attributes:
        own: Of the process that has most, without mapped files.
        all: With its children, where what they share counts once.
        mapped: Of files, in the process that has most of them mapped.
        gpu: Of the GPU, by all processes.
    """

    own: int = 0
    all: int = 0
    mapped: int = 0
    gpu: int = 0

    def see(self, other: Peaks) -> None:
        """Takes the greater of both."""
        for name, value in vars(other).items():
            setattr(self, name, max(getattr(self, name), value))

    def rounded(self) -> dict[str, float]:
        """In GB."""
        return {name: round(value / 1e9, 3) for name, value in vars(self).items()}


@dataclass
class Finished:
    """A command that has ended.

    Attributes:
        code: Its exit code; None if it took too long.
        seconds: How long it took.
        stdout: What it printed.
        stderr: What it said.
        peaks: Its memory.
        trace: For each line that it said: when, and the peaks until the next.
    """

    code: int | None
    seconds: float
    stdout: str
    stderr: str
    peaks: Peaks
    trace: list[dict[str, Any]] = field(default_factory=list)


def run_watched(
    command: Sequence[str], *, env: dict[str, str], timeout: float, gpu: int = 0, used: GpuMemory | None = None
) -> Finished:
    """Runs a command to its end, or for `timeout` seconds."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    out: list[str] = []
    said: list[tuple[float, str, Peaks]] = [(0.0, "starting", Peaks())]

    def hear() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append((time.monotonic() - begin, line.rstrip(), Peaks()))

    assert process.stdout is not None
    threads = [threading.Thread(target=hear), threading.Thread(target=lambda: out.extend(process.stdout or ()))]
    for thread in threads:
        thread.start()
    sampler = _Sampler(process.pid)
    while process.poll() is None and time.monotonic() - begin < timeout:
        seen = sampler.sample()
        seen.gpu = used.used.get(gpu, 0) if used else 0
        said[-1][2].see(seen)
        time.sleep(_EVERY)
    code = process.poll()
    if code is None:
        os.killpg(process.pid, 9)
        process.wait()
    for thread in threads:
        thread.join(timeout=10)
    peaks = Peaks()
    for _, _, each in said:
        peaks.see(each)
    trace = [{"at": round(at, 1), "step": text[:100], **each.rounded()} for at, text, each in said if each.own]
    stderr = "\n".join(text for _, text, _ in said[1:])
    return Finished(code, round(time.monotonic() - begin, 1), "".join(out), stderr, peaks, trace)


class _Sampler:
    def __init__(self, pid: int) -> None:
        self._pid, self._round, self._shared = pid, 0, 0
        self._known: set[int] = set()

    def sample(self) -> Peaks:
        status = {pid: _status(pid) for pid in [self._pid, *_descendants(self._pid)]}
        largest = max(status, key=lambda pid: status[pid].get("RssAnon", 0))
        own = status[largest].get("RssAnon", 0)
        if self._round % _SHARED_EVERY == 0 or status.keys() != self._known:
            self._shared = sum(_private(pid) for pid in status if pid != largest)
            self._known = set(status)
        self._round += 1
        return Peaks(own, own + self._shared, max(each.get("RssFile", 0) for each in status.values()))


def _status(pid: int) -> dict[str, int]:
    """Returns a process's memory in bytes, by the names of /proc; nothing if it has ended."""
    return dict(_numbers(Path(f"/proc/{pid}/status")))


def _private(pid: int) -> int:
    """Returns a process's memory without files, where what several processes share is divided among them."""
    return dict(_numbers(Path(f"/proc/{pid}/smaps_rollup"))).get("Pss_Anon", 0)


def _numbers(file: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            yield name, int(rest[:-3]) * 1024


def _descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            waiting += children
    return found


@contextmanager
def gpu_memory() -> Iterator[GpuMemory]:
    """Reads the GPUs' memory while the block runs."""
    reading = GpuMemory()
    try:
        yield reading
    finally:
        reading.close()
