"""Fuzzes one promise with atheris: `python -m tests.fuzz.run archive corpus/ -max_total_time=300`. See README.md."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["exportkit", "json"]):
    from tests.fuzz import mutations


def main() -> None:
    """Arguments: the promise, a folder for the corpus, and libFuzzer's own."""
    name, corpus, *options = sys.argv[1:]
    promise, mutate, first = mutations.PROMISES[name]
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(first):
        Path(corpus, f"first-{number}").write_bytes(data)
    counts = {True: 0, False: 0}

    def one(data: bytes) -> None:
        counts[promise(data)] += 1
        if sum(counts.values()) % 50_000 == 0:
            print(f"{sum(counts.values())} inputs, {counts[True]} taken", file=sys.stderr)

    def change(data: bytes, limit: int, seed: int) -> bytes:
        def bytewise(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, max(len(part) + 64, 64)))

        return mutate(data, bytewise, random.Random(seed))[:limit]

    arguments = [sys.argv[0], "-max_len=65536", "-timeout=60", "-rss_limit_mb=2048", *options, corpus]
    atheris.Setup(arguments, one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
