"""A real package behind the application: right answers, exchanged under load, drained without a lost request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as client

import exportkit
from exportkit.serve.engine.repository import Repository
from exportkit.serve.http.asgi import make_app
from exportkit.serve.http.exchange import HttpOptions
from exportkit.serve.serve_options import ServeOptions
from tests.runtime import tiny
from tests.serve.page.in_thread import listening_server


class Served:
    """A repository behind a server, whose loop runs in a thread."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            self.repository = Repository(self._options)
            await self.repository.open()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        app = make_app(self.repository, HttpOptions())
        self._stop = asyncio.Event()
        async with listening_server(app) as self.site:
            self._ready.set_result(None)
            await self._stop.wait()
        await self.repository.drain()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def client(self) -> Any:
        return client.InferenceServerClient(f"127.0.0.1:{self.site.port}")

    @contextmanager
    def running(self) -> Iterator[Served]:
        self._thread.start()
        self._ready.result(300)
        try:
            yield self
        finally:
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


@pytest.fixture
def server(tiny_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(tiny_package, folder / "tiny.pt2")
    with Served(ServeOptions(repository=folder)).running() as served:
        yield served


def tensors(batch: int) -> tuple[list[Any], tuple[Any, Any]]:
    """A request, and the same as a call."""
    args, kwargs = tiny.example(batch, 2)
    given = {"image": args[0], "query.features": args[1]["features"], "offset": kwargs["offset"]}
    inputs = [client.InferInput(name, list(value.shape), "FP32") for name, value in given.items()]
    return [each.set_data_from_numpy(v.numpy()) for each, v in zip(inputs, given.values())], (args, kwargs)


def answers(found: Any) -> list[np.ndarray]:
    return [found.as_numpy(name) for name in ("regions.mean", "regions.doubled", "rest.0")]


def direct(model: Any, call: tuple[Any, Any]) -> list[np.ndarray]:
    args, kwargs = call
    result = model(*args, **kwargs)
    return [value.numpy() for value in (*result["regions"], result["rest"][0])]


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all((a == b).all() and a.shape == b.shape for a, b in zip(left, right, strict=True))


def test_answers_are_those_of_the_loaded_package(server: Served, tiny_package: Path) -> None:
    with exportkit.load(tiny_package) as model, server.client() as ours:
        for batch in (1, 4):
            inputs, call = tensors(batch)
            expected = direct(model, call)
            for options in ({}, {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}):
                assert equal(answers(ours.infer("tiny", inputs, **options)), expected)
            as_json = [client.InferRequestedOutput(n, binary_data=False) for n in ("rest.0", "regions.mean")]
            found = ours.infer("tiny", inputs, outputs=as_json)
            assert [each["name"] for each in found.get_response()["outputs"]] == ["rest.0", "regions.mean"]
            assert (found.as_numpy("regions.mean") == expected[0]).all()
        stats = ours.get_inference_statistics("tiny")["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == 6
        assert ours.get_model_metadata("tiny")["inputs"][0]["name"] == "image"


def test_what_the_package_does_not_allow(server: Served) -> None:
    inputs, _ = tensors(4)
    with server.client() as ours:
        for bad, words in [
            (inputs[:2], "offset"),
            ([*inputs, client.InferInput("more", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))], "more"),
        ]:
            with pytest.raises(client.InferenceServerException, match=words) as raised:
                ours.infer("tiny", bad)
            assert raised.value.status() == "400"
        limit = server.repository.model("tiny").max_body
        huge = client.InferInput("image", [limit], "FP32").set_data_from_numpy(np.zeros(limit, np.float32))
        with pytest.raises(client.InferenceServerException) as raised:
            ours.infer("tiny", [huge])
        assert raised.value.status() == "413"
        assert answers(ours.infer("tiny", inputs))


def test_models_are_exchanged_under_load_and_unloaded(server: Served) -> None:
    inputs, _ = tensors(2)
    stop = threading.Event()

    def ask() -> int:
        with server.client() as ours:
            count = 0
            while not stop.is_set():
                ours.infer("tiny", inputs)
                count += 1
            return count

    file = next(iter(server.repository._options.repository.iterdir()))
    with concurrent.futures.ThreadPoolExecutor(3) as pool, server.client() as ours:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for _ in range(2):
                before = server.repository.model("tiny")
                shutil.copy(file, file.with_suffix(".new"))
                file.with_suffix(".new").rename(file)  # another file with the same content
                ours.load_model("tiny")
                assert server.repository.model("tiny") is not before
        finally:
            stop.set()
        assert all(each.result() > 0 for each in asking)
        ours.unload_model("tiny")
        assert not ours.is_model_ready("tiny")
        with pytest.raises(client.InferenceServerException) as raised:
            ours.infer("tiny", inputs)
        assert raised.value.status() == "503"
        assert ours.get_model_repository_index()[0]["state"] == "UNAVAILABLE"
        ours.load_model("tiny")
        assert answers(ours.infer("tiny", inputs))


def test_draining_answers_what_was_accepted(server: Served) -> None:
    """The body of the accepted request arrives while the server drains."""
    inputs, _ = tensors(4)
    body, length = client.InferenceServerClient.generate_request_body(inputs)
    head = (
        f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {length}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", server.site.port), timeout=60) as accepted, server.client() as ours:
        accepted.sendall(head + body[:100])
        model = server.repository.model("tiny")
        while not model.package.accepted_bytes:
            threading.Event().wait(0.005)
        drained = asyncio.run_coroutine_threadsafe(server.repository.drain(), server.loop)
        while not server.repository.draining:
            threading.Event().wait(0.005)
        assert ours.is_server_live()
        assert not ours.is_server_ready()
        with pytest.raises(client.InferenceServerException) as raised:
            ours.infer("tiny", inputs)
        assert raised.value.status() == "503"
        assert not drained.done()
        accepted.sendall(body[100:])
        assert accepted.recv(65536).startswith(b"HTTP/1.1 200 OK")
        drained.result(60)


def test_threads_of_clients_get_their_own_answers(server: Served, tiny_package: Path) -> None:
    torch.manual_seed(1)
    with exportkit.load(tiny_package) as model:
        cases = [(inputs, direct(model, call)) for inputs, call in (tensors(1 + index % 4) for index in range(12))]

    def ask(index: int) -> bool:
        with server.client() as ours:
            return all(equal(answers(ours.infer("tiny", inputs)), expected) for inputs, expected in cases[index::4] * 5)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))
