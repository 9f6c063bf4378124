"""What a benchmark found, as values and as JSON. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.errors import UsageError

FORMAT_VERSION = 1
OURS = "exportkit"
"""The measurement that the others are alternatives to."""

OURS_EAGER = "eager with operators"
"""The eager model with the operators of the package: measured beside it, and no alternative to them."""

Direction = Literal["forward", "backward"]
Key = tuple[str, str, str, Direction]  # subject, size, dtype, direction


class ResultStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Refuses keys it does not know."""


class Timing(ResultStruct, frozen=True):
    """Milliseconds a call took: median, first and third quartile, of `count` samples."""

    median: float
    q1: float
    q3: float
    count: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.q3 - self.q1) / 2 / self.median if self.median else 0.0


class Measurement(ResultStruct, frozen=True):
    """One way to do the work.

    Attributes:
        name: "exportkit", "eager", "compile", "library"; for packages also the names of other files.
        what: What was called.
        call: One call as Python makes it, launches included. None where it failed.
        kernels: CUDA only: the device's time for one call, replayed from a CUDA graph; None where none can be made.
        peak_bytes: Most memory that a call had allocated, its outputs included.
        load_ms: What loading it took, for a package; the first of its process also loads the operators.
        note: Why something is missing.
    """

    name: str
    what: str
    call: Timing | None = None
    kernels: Timing | None = None
    peak_bytes: int | None = None
    load_ms: float | None = None
    note: str | None = None


class Row(ResultStruct, frozen=True):
    """One subject at one size.

    Attributes:
        subject: An operator, a chain of operators, or a package.
        size: In the subject's own letters.
        dtype: Of its floating inputs.
        direction: "backward" is the gradient alone, the forward call not counted.
        moved_bytes: Bytes that must move whatever the code is: every input read once, every output written once. None
            for a whole model.
        limit: Milliseconds they take at the rate of a large copy, measured in the same run.
        measurements: Ours first.
    """

    subject: str
    size: str
    dtype: str
    direction: Direction
    moved_bytes: int | None
    limit: float | None
    measurements: tuple[Measurement, ...]

    @property
    def key(self) -> Key:
        """What makes it the same measurement in another run."""
        return self.subject, self.size, self.dtype, self.direction

    def get(self, name: str) -> Measurement | None:
        """The measurement of this name."""
        return next((m for m in self.measurements if m.name == name), None)

    def time(self, name: str) -> Timing | None:
        """The kernels' time where there is one, else the call's."""
        found = self.get(name)
        return (found.kernels or found.call) if found else None

    def ratio(self, name: str) -> float | None:
        """How many times as long as ours the other takes: kernels with kernels, or else calls with calls."""
        ours, other = self.get(OURS), self.get(name)
        if ours is None or other is None:
            return None
        if ours.kernels and other.kernels:
            return other.kernels.median / ours.kernels.median
        return other.call.median / ours.call.median if ours.call and other.call else None

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest alternative and its ratio to ours; below 1 where it is faster than ours."""
        ours = (OURS, OURS_EAGER)
        ratios = [(ratio, m.name) for m in self.measurements if m.name not in ours and (ratio := self.ratio(m.name))]
        return (min(ratios)[1], min(ratios)[0]) if ratios else None

    @property
    def of_limit(self) -> float | None:
        """The share of the copy rate that ours reaches; above 1 where a cache holds what a copy moves."""
        ours = self.time(OURS)
        return self.limit / ours.median if ours and self.limit is not None else None


class Machine(ResultStruct, frozen=True):
    """Where the numbers are from.

    `device` is what the work ran on; `load` the processes that wanted a core when it began, a minute's mean.
    """

    device: str
    cpu: str
    cores: int
    threads: int
    load: float
    gpu: str | None
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    system: str


class Results(ResultStruct, frozen=True):
    """All of one run.

    Attributes:
        format_version: Of this document.
        exportkit: Version.
        commit: Of the working directory, "+" at its end where files were changed; None outside of git.
        created: UTC, to the second.
        command: That made it.
        machine: Where.
        copy_gb_s: Rate of a large copy, bytes read plus bytes written, in this run.
        rows: In the order they were measured.
    """

    format_version: int
    exportkit: str
    commit: str | None
    created: str
    command: str
    machine: Machine
    copy_gb_s: float
    rows: tuple[Row, ...]


def encode(results: Results) -> bytes:
    """JSON, indented, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


def read(path: Path) -> Results:
    """Reads a results file.

    Raises:
        UsageError: It is none of this version.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no results file of `exportkit bench`: {error}") from error
    if results.format_version != FORMAT_VERSION:
        raise UsageError(f"{path} has results of version {results.format_version}; version {FORMAT_VERSION} is read")
    return results


def merged(runs: Iterable[Results]) -> list[Results]:
    """One for each device: the newest run's description, the commands of all, and of each row the newest.

    A table of operators may take several runs; each row keeps the limit measured in its own.
    """
    by_device: dict[str, list[Results]] = {}
    for run in sorted(runs, key=lambda run: run.created):
        by_device.setdefault(run.machine.device, []).append(run)
    return [
        msgspec.structs.replace(
            group[-1],
            command="\n".join(run.command for run in group),
            rows=tuple({row.key: row for run in group for row in run.rows}.values()),
        )
        for group in by_device.values()
    ]
