"""Sends right and hostile frames of HTTP/2 to the gRPC server: `python -m benchmarks.serve.fuzz_http2 --minutes 30`.

Each connection is made from a grammar. Right ones must be answered; hostile ones must raise nothing, cost no more than
they may, and leave nothing behind; and what the server writes must be what RFC 9113 allows. It stops with the seed of
the first connection for which that does not hold; `--seed` repeats it.

With a package whose methods have state, the messages are steps of sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from exportkit.serve.engine.repository import Repository
from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from exportkit.serve.serve_options import ServeOptions
from tests.serve.rpc.echo_models import EchoModel, EchoRepository
from tests.serve.rpc.hostile_frames import Session, play
from tests.serve.rpc.sequence_requests import steps_of
from tests.serve.rpc.test_grpc_server import request

STEPS, HOSTILE = 40, 0.7
_MEMORY_EVERY = 2000  # connections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?", help="without one: models that echo")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(_fuzz(parser.parse_args()))


async def _fuzz(options: argparse.Namespace) -> None:
    repository, requests = await _opened(options.package)
    server = GrpcServer(repository, RpcOptions(max_held=64 << 20))
    await server.start()
    setup, seed, end = server._setup, options.seed, time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        chance = random.Random(seed)
        session = Session(chance, requests, hostile=chance.random() < HOSTILE, sequences=options.package is not None)
        try:
            await play(setup, session, chance.randrange(1, STEPS))
            async with asyncio.timeout(20):
                while setup.tasks or setup.held or setup.opened:
                    await asyncio.sleep(0)
        except BaseException:
            print(f"seed {seed}, {len(setup.tasks)} tasks, {setup.held} bytes held, {len(setup.opened)} connections")
            raise
        if options.package is None:
            for model in repository.models():
                model.requests.clear()  # type: ignore[attr-defined]  # which the model writes down for tests
        if seed % _MEMORY_EVERY == 0:
            print(f"{seed} connections, {psutil.Process().memory_info().rss / 1e6:.0f} MB", flush=True)
        seed += 1
    print(f"{seed - options.seed} connections in {options.minutes:.0f} minutes: nothing was found")
    await server.stop(1)


async def _opened(package: Path | None) -> tuple[Repository, Sequence[bytes]]:
    if package is None:
        return EchoRepository(EchoModel()), [request(1), request(100), request(20_000)]  # type: ignore[return-value]  # no real one
    repository = Repository(ServeOptions(packages=(package,)))
    await repository.open()
    return repository, steps_of(repository.models()[0])


if __name__ == "__main__":
    main()
