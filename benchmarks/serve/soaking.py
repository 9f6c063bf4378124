"""What both soaks need: threads that repeat work, counts of what they saw, and the server's memory."""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.serve.running import Server

GROWTH, GROWTH_BYTES = 1.05, 16 << 20  # of memory, from the second quarter of the time to the last
WATCH_SECONDS = 2.0

Work = Callable[[random.Random], None]


class Soaking:
    """Clients and faults, and what they saw. A name that begins with WRONG must never be there.

    Attributes:
        seen: How often each thing happened.
        memory: The bytes that the server's processes had for themselves, every two seconds.
        stopping: Set when the works shall end.
        draining: Set before the server gets SIGTERM.
    """

    def __init__(self, server: Server, seed: int) -> None:
        """Nothing happens yet. `seed` makes each work's choices."""
        self.server = server
        self.seen: Counter[str] = Counter()
        self.memory: list[int] = []
        self.stopping, self.draining = threading.Event(), threading.Event()
        self._seed = seed
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def let_loose(self, works: Sequence[Work], seconds: float, *, last: Callable[[], None]) -> None:
        """Repeats all works in threads for a time, then sends SIGTERM. `last` is called just before."""
        threads = [
            threading.Thread(target=self._repeat, args=(work, random.Random(f"{self._seed} {index}")))
            for index, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        self._began = time.monotonic()
        while (passed := time.monotonic() - self._began) < seconds:
            time.sleep(min(WATCH_SECONDS, seconds / 3))
            self.memory.append(self.server.own_memory())
            self.watch()
            if int(passed / 60) != int((passed + WATCH_SECONDS) / 60):
                print(f"{passed / 60:.0f} min, {self.memory[-1] / 1e6:.0f} MB, {self.counted()}", flush=True)
        self.draining.set()
        last()
        self.server.process.send_signal(signal.SIGTERM)
        self.stopping.set()
        for thread in threads:
            thread.join()

    def watch(self) -> None:
        """Is called every two seconds."""

    def problems(self) -> list[str]:
        """Waits for the server's end. Returns what was not as promised."""
        code = self.server.process.wait(60)
        found = [f"{name}: {count}" for name, count in sorted(self.seen.items()) if name.startswith("WRONG")]
        if code:
            found.append(f"the server ended with {code}")
        before, after = self.quarters()
        if before and after > GROWTH * before + GROWTH_BYTES:
            found.append(f"memory grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB")
        return found

    @property
    def minutes(self) -> float:
        """How long it has lasted."""
        return (time.monotonic() - self._began) / 60

    def quarters(self) -> tuple[float, float]:
        """Returns the median bytes of memory in the second quarter of the time and in the last; 0: it was too short."""
        quarter = len(self.memory) // 4
        if not quarter:
            return 0.0, 0.0
        return statistics.median(self.memory[quarter : 2 * quarter]), statistics.median(self.memory[-quarter:])

    def count(self, what: str) -> None:
        """Something happened."""
        with self._lock:
            self.seen[what] += 1

    def counted(self) -> str:
        """Returns what happened, for people."""
        with self._lock:
            return ", ".join(f"{name}: {count}" for name, count in sorted(self.seen.items()))

    def _repeat(self, work: Work, chance: random.Random) -> None:
        while not self.stopping.is_set():
            try:
                work(chance)
            except Exception as error:  # whatever it is, the others go on
                wrong = f"WRONG: no answer to {work.__name__}: {error!r}"
                self.count("closed while draining" if self.draining.is_set() else wrong)
