"""What the batcher itself costs: microseconds of one core for each request.

    python -m benchmarks.serve.batching_cost

A request is submitted, taken in a batch, and its batch's time recorded; after each submission and each batch the
caller asks for late requests and for the next event, as a server does. `waiting` requests wait all the time.
Prints a Markdown table of medians of several rounds.
"""

from __future__ import annotations

import statistics
import time

from exportkit.serve.batching.batcher import Batcher
from exportkit.serve.batching.pending import BatchLimits, PendingRequest

ROUNDS, REQUESTS = 7, 20_000


def shape(shape: int) -> tuple[object, ...]:
    """As an engine names one: name, dtype and shape of each input."""
    return (("pixels", "FP32", (3, shape, shape)), ("weights", "FP32", (3,)))


def round_trip(*, waiting: int, max_rows: int, shapes: int, timeout: float | None, cancelled: bool) -> float:
    """Returns seconds for each request."""
    batcher: Batcher[PendingRequest] = Batcher(BatchLimits(max_queued_rows=2 * waiting + 2 * max_rows), max_rows)
    requests = []
    for index in range(REQUESTS):
        now = index * 1e-4
        deadline = None if timeout is None else now + timeout
        requests.append(PendingRequest(shape(index % shapes), 1, 1000, 2, deadline, now))
    start = time.process_time()
    for pending in requests:
        now = pending.arrived
        batcher.submit(pending)
        if cancelled:
            if batcher.queued_rows > waiting:
                batcher.cancel(pending)
        else:
            while batcher.queued_rows > waiting + max_rows:
                batch = batcher.take(now)
                assert batch is not None
                batcher.finished(batch, 1e-3)
                batcher.late(now)
                batcher.next_event(now)
        batcher.late(now)
        batcher.next_event(now)
    return (time.process_time() - start) / REQUESTS


def main() -> None:
    print("| waiting | rows of a batch | shapes | timeout | end | microseconds |")
    print("| --: | --: | --: | --: | --- | --: |")
    for waiting, max_rows, shapes, timeout, cancelled in [
        (0, 1, 1, None, False),
        (16, 8, 1, None, False),
        (1000, 8, 1, None, False),
        (1000, 8, 1, 60.0, False),
        (1000, 64, 1, 60.0, False),
        (1000, 8, 50, 60.0, False),
        (1000, 8, REQUESTS, 60.0, False),
        (1000, 8, 50, 60.0, True),
    ]:
        seconds = statistics.median(
            round_trip(waiting=waiting, max_rows=max_rows, shapes=shapes, timeout=timeout, cancelled=cancelled)
            for _ in range(ROUNDS)
        )
        says = "none" if timeout is None else f"{timeout:.0f} s"
        print(
            f"| {waiting} | {max_rows} | {shapes} | {says} | {'cancel' if cancelled else 'run'} | {seconds * 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
