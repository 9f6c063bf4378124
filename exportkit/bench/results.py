"""A benchmark's results as values and as JSON. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import msgspec

FORMAT_VERSION = 1
OURS = "exportkit"
"""The measurement that the others are compared with, but for a candidate's."""

OURS_GRAPHS = "exportkit with CUDA graphs"
"""The same with `cuda_graphs`."""

OURS_EAGER = "eager with operators"
"""The eager model with the package's operators. It is measured but does not count as an alternative."""

Direction = Literal["forward", "backward"]
Key = tuple[str, str, str, Direction]  # subject, size, dtype, direction


class ResultStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Refuses unknown keys."""


class Timing(ResultStruct, frozen=True):
    """The milliseconds of a call: median, first and third quartile of `count` samples."""

    median: float
    q1: float
    q3: float
    count: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, divided by the median."""
        return (self.q3 - self.q1) / 2 / self.median if self.median else 0.0


class Measurement(ResultStruct, frozen=True):
    """One way to do the work.

    Attributes:
        name: "exportkit" or "candidate", "eager", "compile", "library"; for packages also OURS_GRAPHS, "max-autotune",
            "reduce-overhead", "freezing", "onnxruntime" and the names of other files.
        what: A description of the call.
        call: The time of one call from Python, including launches. None if it failed.
        kernels: CUDA only: the device's time for one call, replayed from a CUDA graph. None if there is no graph.
        peak_bytes: The peak of the memory that a call allocated, including its outputs.
        load_ms: The loading time of a package. The first package of a process also loads the operators.
        error: The rms error of the least accurate output of a package, against the model in a wider dtype. None if that
            is unknown.
        note: Why something is missing.
    """

    name: str
    what: str
    call: Timing | None = None
    kernels: Timing | None = None
    peak_bytes: int | None = None
    load_ms: float | None = None
    error: float | None = None
    note: str | None = None


class Row(ResultStruct, frozen=True):
    """One subject at one size.

    Attributes:
        subject: An operator, a chain of operators, or a package.
        size: The size, in the subject's letters.
        dtype: The dtype of the floating inputs.
        direction: "backward" is the gradient alone, without the forward call.
        moved_bytes: The bytes that any code must move: every input read once, every output written once. None for a
            whole model.
        limit: The milliseconds for these bytes at the rate of a large copy, measured in the same run.
        measurements: The measurements, first the one that the others are compared with: exportkit's or a candidate's.
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
        """Identifies the same measurement in another run."""
        return self.subject, self.size, self.dtype, self.direction

    @property
    def ours(self) -> Measurement:
        """The measurement that the others are compared with."""
        return self.measurements[0]

    def get(self, name: str) -> Measurement | None:
        """Returns the measurement with this name; None if there is none."""
        return next((m for m in self.measurements if m.name == name), None)

    def time(self, name: str) -> Timing | None:
        """Returns the kernels' time if there is one, else the call's."""
        found = self.get(name)
        return (found.kernels or found.call) if found else None

    def ratio(self, name: str) -> float | None:
        """Returns the other's time divided by exportkit's: the kernels' times if both have them, else the calls'.

        Of a package with and without CUDA graphs, the faster call counts.
        """
        other = self.get(name)
        if other is None:
            return None
        if self.ours.kernels and other.kernels:
            return other.kernels.median / self.ours.kernels.median
        calls = [m.call.median for m in (self.ours, self.get(OURS_GRAPHS)) if m and m.call]
        return other.call.median / min(calls) if calls and other.call else None

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest alternative and its ratio to exportkit's time; below 1 if it is faster than exportkit."""
        ours = (self.ours.name, OURS_GRAPHS, OURS_EAGER)
        ratios = [(ratio, m.name) for m in self.measurements if m.name not in ours and (ratio := self.ratio(m.name))]
        return (min(ratios)[1], min(ratios)[0]) if ratios else None

    @property
    def of_limit(self) -> float | None:
        """The share of the copy rate that exportkit reaches; above 1 if a cache holds the data."""
        ours = self.time(self.ours.name)
        return self.limit / ours.median if ours and self.limit is not None else None


class Machine(ResultStruct, frozen=True):
    """The machine of a run.

    `device` is the device that did the work. `load` is the load average of the minute before.
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
    """The results of one run.

    Attributes:
        format_version: The version of this document's format.
        exportkit: The version of exportkit.
        commit: The working directory's commit, with "+" at its end if files were changed; None outside git.
        created: The time in UTC, to the second.
        command: The command that made the results.
        machine: The machine.
        copy_gb_s: The rate of a large copy in this run, bytes read plus bytes written.
        rows: The rows, in the order of measurement.
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
    """Returns JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"
