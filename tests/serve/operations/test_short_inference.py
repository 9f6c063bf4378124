"""What is answered without ASGI is answered as the application does it: to clients, logs and counters."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exportkit.serve.engine.model_copy import ModelCopy
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.listeners import open_port
from exportkit.serve.operations import short_inference
from exportkit.serve.operations.asgi_request import AsgiRequest
from exportkit.serve.operations.connection_limits import ConnectionLimits
from exportkit.serve.operations.front_end import FrontEnd
from exportkit.serve.operations.observation import Finished, Observation
from exportkit.serve.operations.short_inference import ShortInference
from exportkit.serve.protocol.tensors import body_buffer
from exportkit.serve.serve_options import ServeOptions
from tests.serve.operations import asking_tiny
from tests.serve.operations.limited_server import run

_BODY = asking_tiny.body()
_GIVEN_ONLY = ("date", "x-request-id")


class Way:
    """A front end, by itself or with the short way, and what it saw."""

    def __init__(self, repository: Repository, *, short: bool) -> None:
        self.finished: list[Finished] = []
        self.taken: list[bool] = []  # for each request, whether it went the short way
        self.options = HttpOptions(idle_seconds=0.3)
        self.observation = Observation([self.finished.append])
        make = partial(self._make, repository) if short else None
        self.front = FrontEnd(ConnectionLimits(), None, None, frozenset(), self.observation, make)

    def _make(self, repository: Repository, *given: Any) -> Callable[..., bool]:
        short = ShortInference(repository, self.observation, *given, options=self.options)

        def take(request: Any) -> bool:
            self.taken.append(short(request))
            return self.taken[-1]

        return take

    async def open(self, repository: Repository) -> None:
        sockets = open_port("127.0.0.1", 0, "--port")
        self.port = sockets[0].getsockname()[1]
        self.front.start(sockets, lambda middleware: make_app(repository, self.options, middleware=middleware))

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def ask(self, data: bytes, *, cut: bool = False) -> tuple[int, dict[str, str], bytes]:
        """`cut`: half of the body comes later."""
        rest = (len(data) - len(data.partition(b"\r\n\r\n")[2])) // 2 if cut else 0
        reader, writer = await self.send(data[: len(data) - rest])
        if rest:
            await asyncio.sleep(0.02)
            writer.write(data[-rest:])
        status, headers = await _head(reader)
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        return status, headers, body

    async def seen(self, number: int) -> Finished:
        while len(self.finished) < number:
            await asyncio.sleep(0.001)
        return self.finished[number - 1]


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:])


@asynccontextmanager
async def ways(package: Path) -> AsyncIterator[tuple[Repository, Way, Way]]:
    repository = Repository(ServeOptions((package,)))
    await repository.open()
    found = [Way(repository, short=short) for short in (False, True)]
    for each in found:
        await each.open(repository)
    yield repository, found[0], found[1]
    await repository.drain()
    for each in found:
        await each.front.close()


def request(
    body: bytes = _BODY, *headers: str, path: str = asking_tiny.INFER, version: str = "1.1", method: str = "POST"
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def changed(**keys: Any) -> bytes:
    return json.dumps({**json.loads(_BODY), **keys}).encode()


def binary(*headers: str, cut: int = 0, seed: int = 0, name: str = "7") -> bytes:
    arrays = asking_tiny.arrays(seed=seed)
    inputs = [
        {"name": name, "datatype": "FP32", "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, array in zip(asking_tiny.NAMES, arrays)
    ]
    head = json.dumps({"id": name, "inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(array.tobytes() for array in arrays)
    return request(body[: len(body) - cut], f"Inference-Header-Content-Length: {len(head)}", *headers)


NAN = changed(inputs=[{**each, "data": [3e38] * len(each["data"])} for each in json.loads(_BODY)["inputs"]])

SHORT = {
    "JSON": request(),
    "binary": binary(),
    "a version": request(path="/v2/models/tiny/versions/1/infer"),
    "a timeout": request(changed(parameters={"timeout": 60_000_000, "priority": 1})),
    "an id": request(changed(id="a")),
    "the client's id": request(_BODY, "X-Request-Id: 77"),
    "a list of codings": request(_BODY, "Accept-Encoding: gzip, deflate"),
    "the last of a connection": request(_BODY, "Connection: close"),
    "a page of this server": request(_BODY, "Origin: http://x"),
    "infinity, which JSON has not": request(NAN),
}
LONG = {
    "no JSON": request(b"{"),
    "an unknown input": request(changed(inputs=[])),
    "an unknown output": request(changed(outputs=[{"name": "nothing"}])),
    "a sequence": request(changed(parameters={"sequence_id": 1, "sequence_start": True})),
    "a region": request(changed(outputs=[{"name": "rest.0", "parameters": {"shared_memory_region": "a"}}])),
    "an unknown model": request(path="/v2/models/other/infer"),
    "an unknown version": request(path="/v2/models/tiny/versions/9/infer"),
    "another method": request(method="PUT"),
    "an old client": request(version="1.0"),
    "two hosts": request(_BODY, "Host: y"),
    "a page of another server": request(_BODY, "Origin: http://y"),
    "one coding": request(_BODY, "Accept-Encoding: gzip"),
    "too short a body": binary(cut=8),
    "a wrong length of the JSON": request(_BODY, "Inference-Header-Content-Length: 9000"),
    "an unknown coding": request(_BODY, "Content-Encoding: br"),
}


@pytest.mark.parametrize("cut", [False, True])
def test_answers_logs_and_counters_are_those_of_the_application(tiny_package: Path, cut: bool):
    def counters(repository: Repository) -> dict[str, Any]:
        (counted,) = repository.counted().values()
        failures = {reason: spent.count for reason, spent in counted.failures.items()}
        return {"success": counted.success.count, "rows": counted.rows, "pending": counted.pending, **failures}

    def difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        return {key: now[key] - before.get(key, 0) for key in now if now[key] != before.get(key, 0)}

    async def scenario() -> None:
        async with ways(tiny_package) as (repository, long, short):
            # What is known by an earlier request is answered in the same way.
            for number, (what, data) in enumerate([*SHORT.items(), *SHORT.items(), *LONG.items()], 1):
                found = []
                for way in (long, short):
                    before = counters(repository)
                    status, headers, body = await way.ask(data, cut=cut)
                    seen = await way.seen(number)
                    assert headers["x-request-id"] == seen.record.id, what
                    shown = {key: value for key, value in headers.items() if key not in _GIVEN_ONLY}
                    record = replace(seen.record, id="", started=0.0, timing=None)
                    rows = seen.record.timing and seen.record.timing.batch_rows
                    about = seen.method, seen.path, seen.remote, seen.scheme, dict(seen.metadata)
                    found.append((status, shown, body, record, rows, about, difference(counters(repository), before)))
                    assert way.observation.in_flight == 0
                assert found[0] == found[1], what
                assert short.taken[-1] == (what in SHORT) or cut, what
                assert short.taken[-1] or what in LONG, what
                assert found[1][0] == 200 or what in LONG or what.startswith("infinity"), what

    run(scenario)


def test_answers_are_those_of_eager(tiny_package: Path):
    async def scenario() -> None:
        async with ways(tiny_package) as (_, _, short):
            inputs = asking_tiny.arrays(seed=5)
            status, _, body = await short.ask(request(asking_tiny.body(inputs)))
            assert status == 200
            np.testing.assert_allclose(asking_tiny.mean(body), asking_tiny.expected(inputs), atol=1e-5)
            assert short.taken == [True]

    run(scenario)


def test_requests_that_differ_in_elements_alone_have_answers_of_their_own(tiny_package: Path):
    async def scenario() -> None:
        async with ways(tiny_package) as (repository, _, short):
            (model,) = repository.models()
            assert isinstance(model, ServedModel)
            for seed in range(3):
                _, headers, body = await short.ask(binary(seed=seed))
                size = int(headers["inference-header-content-length"])
                expected = asking_tiny.expected(asking_tiny.arrays(seed=seed)).ravel()
                found = np.frombuffer(body, np.float32, expected.size, size)
                np.testing.assert_allclose(found, expected, atol=1e-5)
                assert (short.taken.pop(), len(model._asks.known)) == (True, 1)
            for number in range(300):  # what a client can make known is bounded
                await short.ask(binary(name=f"{number}"))
                assert len(model._asks.known) <= 256

    run(scenario)


def test_a_plain_request_leaves_nothing_to_the_garbage_collector(tiny_package: Path):
    async def scenario() -> None:
        async with ways(tiny_package) as (_, _, short):
            reader, writer = await short.send(binary())
            await _head(reader)
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            for _ in range(3):
                writer.write(binary())
                await reader.readuntil(b"\r\n\r\n")
            await short.seen(4)
            gc.collect()
            assert not [each for each in gc.garbage if isinstance(each, AsgiRequest)]
            writer.close()

    try:
        run(scenario)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_requests_that_follow_without_waiting_are_answered_in_order(tiny_package: Path):
    async def scenario() -> None:
        async with ways(tiny_package) as (_, _, short):
            data = [request(changed(id=f"{number}")) for number in range(20)]
            data[7] = request(b"{")
            whole = b"".join(data)
            reader, writer = await short.send(whole[:1000])
            await asyncio.sleep(0.01)
            writer.write(whole[1000:])
            for number in range(20):
                status, headers = await _head(reader)
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                assert (status, body.get("id")) == ((400, None) if number == 7 else (200, f"{number}"))
            writer.close()

    run(scenario)


@pytest.fixture
def may_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The model waits for this event before it answers requests."""
    event, run_requests = threading.Event(), ModelCopy.run_requests

    def wait(copy: ModelCopy, *arguments: Any) -> Any:
        event.wait()
        return run_requests(copy, *arguments)

    event.set()  # so that the model can be warmed up
    monkeypatch.setattr(ModelCopy, "run_requests", wait)
    yield event
    event.set()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_request_whose_client_leaves_is_taken_from_the_queue(tiny_package: Path, may_run: threading.Event):
    async def scenario() -> None:
        async with ways(tiny_package) as (repository, _, short):
            (counted,) = repository.counted().values()
            may_run.clear()
            _, first = await short.send(request())
            await until(lambda: counted.busy_runners)
            _, second = await short.send(request())
            await until(lambda: counted.pending)
            second.transport.abort()
            record = (await short.seen(1)).record
            assert (record.status, counted.pending, counted.failures["cancelled"].count) == (499, 0, 1)
            first.transport.abort()  # its request runs: nobody gets the answer
            assert (await short.seen(2)).record.status == 499
            assert (await short.ask(request(changed(parameters={"timeout": 1000}))))[0] == 504
            may_run.set()
            assert (await short.ask(request()))[0] == 200
            assert (short.taken, short.observation.in_flight) == ([True] * 4, 0)
            assert counted.success.count == 1

    run(scenario)


def test_the_last_answers_close_their_connections(tiny_package: Path, may_run: threading.Event):
    async def scenario() -> None:
        async with ways(tiny_package) as (_, _, short):
            may_run.clear()
            reader, _ = await short.send(request())
            await until(lambda: short.taken)
            short.front.drain()
            may_run.set()
            status, headers = await _head(reader)
            assert (status, headers["connection"]) == (200, "close")
            await reader.readexactly(int(headers["content-length"]))
            assert await reader.read() == b""
            assert (await short.ask(request()))[1]["connection"] == "close"

    run(scenario)


def held(repository: Repository) -> int:
    """The bytes of accepted bodies."""
    (model,) = repository.models()
    assert isinstance(model, ServedModel)
    return model._accepted.bytes


def test_a_body_that_still_comes_has_room_and_is_answered_when_the_server_ends(tiny_package: Path):
    data = binary()
    size = len(data.partition(b"\r\n\r\n")[2])

    async def scenario() -> None:
        async with ways(tiny_package) as (repository, _, short):
            reader, writer = await short.send(data[:-8])
            await until(lambda: short.taken)
            assert (held(repository), short.observation.in_flight) == (size, 1)
            draining = asyncio.create_task(repository.drain())
            await until(lambda: repository.draining)
            assert (await short.ask(data))[0] == 503
            writer.write(data[-8:])
            assert (await _head(reader))[0] == 200
            await draining
            assert short.taken == [True, False]

    run(scenario)


def test_a_client_that_leaves_or_pauses_gives_the_room_of_its_body_back(tiny_package: Path):
    async def scenario() -> None:
        async with ways(tiny_package) as (repository, long, short):
            found = []
            for way in (long, short):
                _, writer = await way.send(binary()[:-8])
                await until(lambda: held(repository))
                writer.transport.abort()
                assert (await way.seen(1)).record.status == 499
                reader, writer = await way.send(binary()[:-8])
                status, headers = await _head(reader)
                assert (status, headers["connection"]) == (408, "close")
                assert held(repository) == 0
                writer.close()
                await way.seen(2)
                assert way.observation.in_flight == 0
                found.append([replace(each.record, id="", started=0.0) for each in way.finished])
            assert found[0] == found[1]
            assert short.taken == [True, True]

    run(scenario)


def test_the_memory_of_a_body_is_free_once_its_request_is_over(tiny_package: Path, monkeypatch: pytest.MonkeyPatch):
    """A cycle of objects would keep it until Python looks for garbage."""
    bodies = []

    def remembered(*arguments: Any) -> memoryview:
        body = body_buffer(*arguments)
        bodies.append(weakref.ref(body.obj))
        return body

    monkeypatch.setattr(short_inference, "body_buffer", remembered)

    async def scenario() -> None:
        async with ways(tiny_package) as (_, _, short):
            gc.collect()
            gc.disable()
            for data, status in [(binary(), 200), (binary().replace(b"FP32", b"FP64"), 400)] * 2:
                assert (await short.ask(data, cut=True))[0] == status
            _, writer = await short.send(binary()[:-8])
            await until(lambda: len(short.taken) == 5)
            writer.transport.abort()
            await short.seen(5)
            reader, _ = await short.send(binary()[:-8])
            assert (await _head(reader))[0] == 408
            assert len(bodies) == 6
            await until(lambda: not any(body() is not None for body in bodies))

    try:
        run(scenario)
    finally:
        gc.enable()
