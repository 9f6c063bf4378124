"""Connections from a grammar of right and hostile frames. `benchmarks.serve.fuzz_http2` sends more of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from exportkit.serve.rpc.grpc_server import GrpcServer, RpcOptions
from tests.serve.rpc.echo_models import EchoModel, EchoRepository
from tests.serve.rpc.frame_judge import Judge, WrongFrameError
from tests.serve.rpc.hostile_frames import Session, play
from tests.serve.rpc.test_grpc_server import request

CONNECTIONS = 150
REQUESTS = [request(1), request(100), request(20_000)]


@pytest.mark.parametrize("hostile", [False, True])
def test_connections_keep_their_promises_and_leave_nothing(hostile: bool):
    async def fuzz() -> None:
        server = GrpcServer(EchoRepository(EchoModel()), RpcOptions(max_held=64 << 20))  # type: ignore[arg-type]
        await server.start()
        setup = server._setup
        for seed in range(CONNECTIONS):
            chance = random.Random(f"{seed} {hostile}")
            try:
                await play(setup, Session(chance, REQUESTS, hostile=hostile), chance.randrange(1, 30))
                async with asyncio.timeout(30):
                    while setup.tasks or setup.held or setup.opened:
                        await asyncio.sleep(0)
            except BaseException:
                print(f"seed {seed}")
                raise
        await server.stop(1)

    asyncio.run(fuzz())


@pytest.mark.parametrize(
    "written",
    [
        b"\0\0\1\0\0\0\0\0\1x",  # data before headers
        b"\0\0\0\5\0\0\0\0\2",  # a push
        b"\0\0\4\3\0\0\0\0\0\0\0\0\0",  # a reset of no stream
        b"\0\0\1\1\5\0\0\0\1\x88" + b"\0\0\0\0\0\0\0\0\1",  # data after the end
        b"\0\0\1\1\4\0\0\0\1\x88" + b"\1\0\0\0\0\0\0\0\1" + bytes(1 << 16),  # a large frame
    ],
)
def test_the_judge_sees_what_no_server_may_write(written: bytes):
    with pytest.raises(WrongFrameError):
        Judge().read(written)
