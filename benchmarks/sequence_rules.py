"""Two things to compare sequences with: ONNX Runtime of the publisher's own file, and Triton's rule of batching.

Triton's sequence batcher (docs/user_guide/architecture.md of triton-inference-server/server) has two strategies.
*Direct* gives each sequence a slot of a model instance until it ends. A batch has all slots up to the last one that is
taken, whether a request is there for each or not, and is run when an instance is free and a request is there. *Oldest*
takes the requests that are there, at most one of each sequence, oldest first, into batches as its dynamic batcher makes
them. Both are simulated here over measured times of ONNX Runtime, one instance with one thread for each core, with
nothing for the protocol, for scheduling, or for gathering state.
"""

from __future__ import annotations

import heapq
import importlib.util
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PERIOD_MS, TARGET_MS = 32.0, 32.0
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROUNDS, _SECONDS = 15, 10


def onnx_runtime(cores: Sequence[int]) -> dict[str, Any]:
    """Returns the milliseconds of a call for each size of batch, on one thread, and what real time that allows."""
    import onnxruntime

    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        raise ImportError("silero-vad is not installed: pip install --no-deps silero-vad==6.2.3")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    file = Path(found.origin).parent / "data" / "silero_vad.onnx"
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    ms: dict[int, float] = {}
    try:
        for rows in BATCHES:
            x = np.random.default_rng(0).standard_normal((rows, 576), np.float32) / 8
            given = {"input": x, "state": np.zeros((2, rows, 128), np.float32), "sr": np.array(16000)}
            calls = max(3, 200 // rows)
            session.run(None, given)
            ms[rows] = min(_elapsed(session, given, calls) for _ in range(_ROUNDS))
    finally:
        os.sched_setaffinity(0, before)
    return {
        "version": onnxruntime.__version__,
        "ms_a_call": {str(rows): round(each, 3) for rows, each in ms.items()},
        "streams_one_by_one": int(len(cores) * PERIOD_MS / ms[1]),
        "streams_in_batches": int(len(cores) * PERIOD_MS * max(rows / each for rows, each in ms.items())),
    }


def _elapsed(session: Any, given: dict[str, np.ndarray], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        session.run(None, given)
    return (time.perf_counter() - start) * 1e3 / calls


def triton_rule(measured: dict[str, Any], instances: int) -> list[dict[str, Any]]:
    """Simulates both strategies with 1,000 streams and fewer, and returns where each stays below 32 ms."""
    sizes = [int(rows) for rows in measured["ms_a_call"]]
    times = list(measured["ms_a_call"].values())

    def ms(rows: int) -> float:
        return float(np.interp(rows, sizes, times))

    found = []
    for strategy in ("direct", "oldest"):
        for most in (16, 64, 256):
            held = [
                {"streams": streams, "p99_ms": round(p99, 2)}
                for streams in range(50, 2001, 50)
                if (p99 := _simulated(strategy, streams, most, instances, ms)) < TARGET_MS
            ]
            found.append({"strategy": strategy, "max_batch": most, **(held[-1] if held else {"streams": 0})})
    return found


def _simulated(strategy: str, streams: int, most: int, instances: int, ms: Any) -> float:
    """Returns the p99 latency of the chunks of streams that are evenly apart, in ms."""
    slots = most * instances
    if strategy == "direct" and streams > slots:
        return float("inf")  # the sequences beyond wait until others end
    arrivals = sorted((PERIOD_MS * (k + s / streams), s) for s in range(streams) for k in range(_SECONDS * 1000 // 32))
    home = [s % instances for s in range(streams)]
    waiting: list[deque[float]] = [deque() for _ in range(instances)]
    free = [0.0] * instances
    latency: list[float] = []
    events = [(at, 0, s) for at, s in arrivals]
    heapq.heapify(events)
    while events:
        now, kind, which = heapq.heappop(events)
        if kind == 0:
            waiting[home[which] if strategy == "direct" else 0].append(now)
        for instance in range(instances):
            queue = waiting[instance if strategy == "direct" else 0]
            if not queue or free[instance] > now:
                continue
            taken = [queue.popleft() for _ in range(min(most, len(queue)))]
            rows = -(-streams // instances) if strategy == "direct" else len(taken)
            free[instance] = now + ms(rows)
            heapq.heappush(events, (free[instance], 1, instance))
            latency += [free[instance] - came for came in taken]
    return float(statistics.quantiles(latency, n=100)[98])
