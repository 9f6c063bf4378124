"""One client process of benchmarks/sequences.py: tritonclient, unmodified, streams speech in real time.

Reads a Plan as JSON on stdin, says `ready`, waits for the time to begin, and prints what it saw as JSON. Each stream
has its own place in the recording and its own loudness, and each chunk has its own time. Latency counts from that time,
not from the moment at which this process came to send the chunk.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton

import exportkit

SAMPLES, PERIOD = 512, 0.032
TOLERANCE = 1e-4  # a probability in a batch and alone


@dataclass(frozen=True)
class Plan:
    """What a client does.

    Attributes:
        address: Of the server's gRPC.
        model: Its model.
        package: Gives the answers to compare with, by a session of each stream.
        recording: A file of samples.
        first, streams, of: Which of all streams are this client's.
        rows: The streams in one sequence: the rows of a request.
        sequences: The sequences in one call ModelStreamInfer.
        chunks: The chunks of each stream.
        ramp: Seconds within which all streams begin, one after another, as calls do.
    """

    address: str
    model: str
    package: str
    recording: str
    first: int
    streams: int
    of: int
    rows: int
    sequences: int
    chunks: int
    ramp: float


def chunks_of(recording: np.ndarray, stream: int, chunks: int) -> np.ndarray:
    """Returns the chunks [chunks, 512] of a stream."""
    start = stream * 7919 % len(recording)
    repeated = np.resize(np.roll(recording, -start), chunks * SAMPLES)
    loudness = np.float32(0.4 + 0.6 * (stream * 37 % 101) / 101)
    return (repeated * loudness).reshape(chunks, SAMPLES)


class Client:
    """Sends the chunks of some streams, and keeps what comes back."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        recording = np.load(plan.recording)
        each = range(plan.first, plan.first + plan.streams)
        spoken = np.stack([chunks_of(recording, stream, plan.chunks) for stream in each])
        self._chunks = spoken.reshape(-1, plan.rows, plan.chunks, SAMPLES).swapaxes(1, 2)  # sequence, chunk, row
        self._expected = self._alone()
        count = len(self._chunks)
        self._seconds = np.full((count, plan.chunks), np.nan)
        self._found = np.full((count, plan.chunks, plan.rows), np.nan, np.float32)
        self._late: list[float] = []
        self._problems: Counter[str] = Counter()
        self._until = np.full(count, plan.chunks)  # the first chunk of a sequence that was refused
        self._due = np.zeros((count, plan.chunks))

    def _alone(self) -> np.ndarray:
        """Returns the answers of a single session of each stream: [sequence, chunk, row]."""
        torch.set_num_threads(1)
        found = np.empty(self._chunks.shape[:3], np.float32)
        with exportkit.load(self._plan.package) as model:
            for number, sequence in enumerate(self._chunks):
                for row in range(self._plan.rows):
                    with model.session(streams=1) as session:
                        for place, chunk in enumerate(sequence[:, row]):
                            found[number, place, row] = session(torch.from_numpy(chunk[None].copy()))[0]
        return found

    def run(self, begin: float) -> None:
        """Sends every chunk at its time, from `begin` on."""
        plan, count = self._plan, len(self._chunks)
        gc.freeze()
        clients = [triton.InferenceServerClient(plan.address) for _ in range(-(-count // plan.sequences))]
        asked: list[deque[tuple[int, int]]] = [deque() for _ in clients]  # answers come in this order
        for client, order in zip(clients, asked):
            client.start_stream(partial(self._take, order))
        phases = max(PERIOD, plan.ramp) * (np.arange(count) * plan.rows + plan.first) / plan.of
        self._due[:] = begin + phases[:, None] + PERIOD * np.arange(plan.chunks)
        order = np.argsort(self._due, axis=None)
        for sequence, place in zip(*np.unravel_index(order, self._due.shape)):
            if (left := self._due[sequence, place] - time.time()) > 0:
                time.sleep(left)
            x = triton.InferInput("chunk", [plan.rows, SAMPLES], "FP32")
            x.set_data_from_numpy(self._chunks[sequence, place])
            self._late.append(time.time() - self._due[sequence, place])
            asked[sequence // plan.sequences].append((int(sequence), int(place)))
            clients[sequence // plan.sequences].async_stream_infer(
                plan.model,
                [x],
                request_id=f"{sequence}.{place}",
                sequence_id=plan.first + int(sequence) * plan.rows + 1,
                sequence_start=bool(place == 0),
                sequence_end=bool(place == plan.chunks - 1),
            )
        for client in clients:
            client.stop_stream()

    def _take(self, asked: deque[tuple[int, int]], result: Any, error: Any) -> None:
        now = time.time()
        sequence, place = asked.popleft() if asked else (0, 0)
        if error is not None:  # after which the state of the sequence is another
            self._problems[str(error)[:200]] += 1
            self._until[sequence] = min(self._until[sequence], place)
            return
        answer = result.get_response()
        if answer.id != f"{sequence}.{place}":
            self._problems["answers in another order"] += 1
        self._seconds[sequence, place] = now - self._due[sequence, place]
        self._found[sequence, place] = np.frombuffer(answer.raw_output_contents[0], np.float32)

    def seen(self) -> dict[str, Any]:
        """Returns what came back: the times of first chunks, and of those that were sent while all streams spoke."""
        came = ~np.isnan(self._seconds)
        begin = self._due[:, :1].min(initial=np.inf)
        settled = self._due >= begin + self._plan.ramp + 1
        settled &= self._due < begin + PERIOD * self._plan.chunks
        wrong = np.abs(self._found - self._expected).max(-1) > TOLERANCE
        wrong &= np.arange(self._plan.chunks) < self._until[:, None]
        return {
            "sent": int(self._seconds.size),
            "lost": int((~came).sum()),
            "wrong": int((wrong & came).sum()),
            "problems": dict(self._problems),
            "largest_difference": float(np.nanmax(np.abs(self._found - self._expected), initial=0)),
            "differs_from_neighbour": float((np.abs(np.diff(self._expected, axis=0)) > TOLERANCE).mean())
            if len(self._expected) > 1
            else None,
            "ms": [round(1e3 * each, 2) for each in self._seconds[settled & came].tolist()],
            "due": [round(each, 3) for each in self._due[settled & came].tolist()],
            "start_ms": [round(1e3 * each, 2) for each in self._seconds[:, 0][came[:, 0]].tolist()],
            "late_ms": [round(1e3 * each, 2) for each in sorted(self._late)[:: max(1, len(self._late) // 200)]],
        }


def main() -> None:
    plan = Plan(**json.loads(sys.stdin.readline()))
    client = Client(plan)
    print("ready", flush=True)
    client.run(float(sys.stdin.readline()))
    print(json.dumps(client.seen()), flush=True)


if __name__ == "__main__":
    main()
