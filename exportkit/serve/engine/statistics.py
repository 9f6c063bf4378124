"""What a served model counts: the source of the statistics in the protocol and of the metrics."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from exportkit.serve.protocol.inference import InferTiming

# Upper bounds of the histogram of request seconds, as Prometheus has them: a request counts in the first that it is not
# greater than. Requests beyond the last count in one more.
REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_LISTED_ROWS = 256  # batches of up to so many rows are counted by their number of rows


@dataclass
class Spent:
    """How often something happened, and the seconds that it took together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts once more."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Stages:
    """The stages of requests or batches. `queue` stays at 0 for batches, whose requests waited for different times."""

    queue: Spent = field(default_factory=Spent)
    compute_input: Spent = field(default_factory=Spent)
    compute_infer: Spent = field(default_factory=Spent)
    compute_output: Spent = field(default_factory=Spent)


class Statistics:
    """The counters of one version of a model, since it was first loaded. Any thread may count and read.

    Attributes:
        success: Answered requests, and their seconds from acceptance to the answer.
        failures: Requests that were accepted or refused and got no answer, by the `reason` of their error.
        rows: The rows of all batches that ran (Triton's inference_count).
        executions: The batches that ran (Triton's execution_count).
        stages: Where the answered requests' time went. Each request counts the whole time of its batch.
        batches: The same for batches, by their number of rows; large ones count as the next power of two.
        request_seconds: The histogram of `success`: a count for each bound of REQUEST_SECONDS, and one for beyond.
        pending: The requests that wait.
        queued_rows: Their rows.
        queued_bytes: The bytes of their inputs.
        runners: The number of batches that can run at the same time.
        busy_runners: The number that run.
        last_inference: When the last batch ended, in seconds since 1970; None before the first.
        load_seconds: How long the last load took, warm-up included.
    """

    def __init__(self) -> None:
        """Everything is 0."""
        self.success = Spent()
        self.failures: dict[str, Spent] = {}
        self.rows = 0
        self.executions = 0
        self.stages = Stages()
        self.batches: dict[int, Stages] = {}
        self.request_seconds = [0] * (len(REQUEST_SECONDS) + 1)
        self.pending = 0
        self.queued_rows = 0
        self.queued_bytes = 0
        self.runners = 0
        self.busy_runners = 0
        self.last_inference: float | None = None
        self.load_seconds = 0.0
        self._lock = threading.Lock()

    def succeeded(self, timing: InferTiming, seconds: float) -> None:
        """Counts an answered request."""
        with self._lock:
            self.success.add(seconds)
            self.request_seconds[bisect_left(REQUEST_SECONDS, seconds)] += 1
            self.stages.queue.add(timing.queue)
            self.stages.compute_input.add(timing.compute_input)
            self.stages.compute_infer.add(timing.compute_infer)
            self.stages.compute_output.add(timing.compute_output)

    def failed(self, reason: str, seconds: float = 0.0) -> None:
        """Counts a request that got no answer."""
        with self._lock:
            self.failures.setdefault(reason, Spent()).add(seconds)

    def executed(self, rows: int, *, compute_input: float, compute_infer: float, compute_output: float) -> None:
        """Counts a batch that ran."""
        with self._lock:
            self.rows += rows
            self.executions += 1
            self.last_inference = time.time()
            listed = _listed(rows)
            batch = self.batches.get(listed) or self.batches.setdefault(listed, Stages())
            batch.compute_input.add(compute_input)
            batch.compute_infer.add(compute_infer)
            batch.compute_output.add(compute_output)

    def entered(self, rows: int, size: int) -> None:
        """Counts a request that begins to wait, with its rows and the bytes of its inputs."""
        with self._lock:
            self.pending += 1
            self.queued_rows += rows
            self.queued_bytes += size

    def busy(self, more: int) -> None:
        """Counts runners that began to run, or (-1) ended."""
        with self._lock:
            self.busy_runners += more

    def left(self, rows: int, size: int) -> None:
        """Counts a request that waits no more."""
        with self._lock:
            self.pending -= 1
            self.queued_rows -= rows
            self.queued_bytes -= size

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """Returns the element of `model_stats` in Triton's statistics. Durations are in ns, times in ms since 1970."""
        with self._lock:
            failed = Spent(
                sum(each.count for each in self.failures.values()), sum(each.seconds for each in self.failures.values())
            )
            return {
                "name": name,
                "version": version,
                "last_inference": int((self.last_inference or 0) * 1e3),
                "inference_count": self.rows,
                "execution_count": self.executions,
                "inference_stats": {
                    "success": _duration(self.success),
                    "fail": _duration(failed),
                    "queue": _duration(self.stages.queue),
                    **_compute(self.stages),
                    "cache_hit": _duration(Spent()),
                    "cache_miss": _duration(Spent()),
                },
                "response_stats": {},
                "batch_stats": [
                    {"batch_size": rows, **_compute(stages)} for rows, stages in sorted(self.batches.items())
                ],
                "memory_usage": [],
            }


def _listed(rows: int) -> int:
    """Returns the number of rows by which a batch is listed, so that clients cannot make the list long."""
    return rows if rows <= _LISTED_ROWS else 1 << (rows - 1).bit_length()


def _compute(stages: Stages) -> dict[str, Any]:
    return {
        "compute_input": _duration(stages.compute_input),
        "compute_infer": _duration(stages.compute_infer),
        "compute_output": _duration(stages.compute_output),
    }


def _duration(spent: Spent) -> dict[str, int]:
    return {"count": spent.count, "ns": int(spent.seconds * 1e9)}
