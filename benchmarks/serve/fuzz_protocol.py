"""Sends hostile bodies through the parser of inference requests: `python -m benchmarks.serve.fuzz_protocol`.

Stops with the traceback, the body and the seed at the first exception that is not a ServeError.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from tests.serve.protocol.hostile_bodies import make, survives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    _try(arguments.bodies, arguments.seed)


def _try(bodies: int, seed: int) -> None:
    chance, requests, start, before = random.Random(seed), 0, time.monotonic(), _peak_mib()
    for number in range(bodies):
        body, length = make(chance)
        try:
            requests += survives(body, length)
        except BaseException:
            print(f"body {number} of seed {seed}, Inference-Header-Content-Length {length!r}: {body!r}")
            raise
    seconds = time.monotonic() - start
    print(
        f"{bodies} bodies (seed {seed}) in {seconds:.0f} s: {requests} requests, {bodies - requests} refused, "
        f"no other exception; peak memory grew by {_peak_mib() - before:.1f} MiB"
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
