"""Sends hostile bytes through the reader of gRPC's inference requests: `python -m benchmarks.serve.fuzz_rpc`.

Stops with the traceback and the bytes at the first exception that is not a ServeError.
"""

from __future__ import annotations

import argparse
import random
import time

from tests.serve.rpc.hostile_messages import make, survives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance, taken, start = random.Random(arguments.seed), 0, time.monotonic()
    for _ in range(arguments.messages):
        data = make(chance)
        try:
            taken += survives(data)
        except BaseException:
            print(data.hex())
            raise
    seconds = time.monotonic() - start
    print(
        f"{arguments.messages} messages: {taken} were requests, {arguments.messages - taken} refused; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
