"""A real package behind gRPC: its answers, its descriptions, its counters, loading and draining."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from exportkit.serve.engine.repository import Repository
from exportkit.serve.serve_options import LoadOptions, ServeOptions
from tests.runtime import tiny
from tests.serve.rpc.serving_echo import Served, served

EMPTY_MAPS = {"response_stats"}
OUTPUTS = ("regions.mean", "regions.doubled", "rest.0")


@pytest.fixture(scope="module")
def folder(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with one model."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(tiny_package, folder / "tiny.pt2")
    return folder


@pytest.fixture(scope="module")
def real(loop: asyncio.AbstractEventLoop, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPORTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))

        async def opened() -> Repository:
            repository = Repository(ServeOptions(repository=folder, load=LoadOptions(devices=("cpu",))))
            await repository.open()
            return repository

        repository = asyncio.run_coroutine_threadsafe(opened(), loop).result()
        try:
            with served(loop, repository) as server:
                yield server
        finally:
            asyncio.run_coroutine_threadsafe(repository.drain(), loop).result()


@pytest.fixture
def client(real: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(real.address) as client:
        yield client


def inputs_of(batch: int, gh: int, seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    args, kwargs = tiny.example(batch, gh)
    tensors = {"image": args[0], "query.features": args[1]["features"], "offset": kwargs["offset"]}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def given(inputs: dict[str, np.ndarray]) -> list[triton.InferInput]:
    return [triton.InferInput(n, list(a.shape), "FP32").set_data_from_numpy(a) for n, a in inputs.items()]


def expected(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    tensors = [torch.from_numpy(inputs[name]) for name in ("image", "query.features", "offset")]
    return [output.numpy() for output in tiny.Flat()(*tensors)]


def test_a_package_answers_as_its_module(client: triton.InferenceServerClient):
    for batch, gh in [(1, 1), (4, 6), (2, 3)]:
        inputs = inputs_of(batch, gh, batch)
        result = client.infer("tiny", given(inputs))
        for name, output in zip(OUTPUTS, expected(inputs)):
            np.testing.assert_allclose(result.as_numpy(name), output, rtol=1e-5, atol=1e-6)


def test_many_clients_get_their_own_answers_and_are_counted(real: Served, client: triton.InferenceServerClient):
    before = client.get_inference_statistics("tiny").model_stats[0]
    asked = [inputs_of(1, 2, seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda inputs: client.infer("tiny", given(inputs)), asked))
    for inputs, result in zip(asked, results):
        np.testing.assert_allclose(result.as_numpy("rest.0"), expected(inputs)[2], rtol=1e-5, atol=1e-6)
    after = client.get_inference_statistics("tiny").model_stats[0]
    assert after.inference_count - before.inference_count == 40
    assert after.inference_stats.success.count - before.inference_stats.success.count == 40


@pytest.mark.parametrize("what", ["config", "statistics", "metadata"])
def test_nothing_that_the_engine_says_is_lost(real: Served, client: triton.InferenceServerClient, what: str):
    """Except what the protocol's messages have no field for."""
    client.infer("tiny", given(inputs_of(1, 1, 0)))
    said: dict[str, Any] = real.call(getattr(real.model, what))
    if what == "metadata":
        said = {key: said[key] for key in ("name", "versions", "platform", "inputs", "outputs")}
        arrived = client.get_model_metadata("tiny")
    elif what == "config":
        arrived = client.get_model_config("tiny").config
    else:
        arrived = client.get_inference_statistics("tiny").model_stats[0]
    assert without_defaults(as_text(said)) == as_text(MessageToDict(arrived, preserving_proto_field_name=True))


def as_text(value: Any) -> Any:
    """JSON has 64-bit numbers as text in MessageToDict's form, and as numbers in Triton's."""
    if isinstance(value, dict):
        return {key: as_text(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_text(each) for each in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def without_defaults(value: Any) -> Any:
    """proto3 leaves out what is 0, false or empty; an empty message that is there stays."""
    if isinstance(value, list):
        return [without_defaults(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_defaults(each)
        for key, each in value.items()
        if each not in ("0", False, "", []) and key not in EMPTY_MAPS
    }


def test_statistics_of_all_models_and_of_what_is_unknown(client: triton.InferenceServerClient):
    assert [each.name for each in client.get_inference_statistics().model_stats] == ["tiny"]
    for arguments in (("nobody",), ("tiny", "7")):
        with pytest.raises(InferenceServerException, match="NOT_FOUND"):
            client.get_inference_statistics(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((1, 3, 17, 8), np.float32)}, "image"),
        ({"image": np.zeros((5, 3, 16, 8), np.float32)}, "image"),
        ({"more": np.zeros(1, np.float32)}, "more"),
        ({"offset": None}, "offset"),
    ],
)
def test_what_the_model_does_not_take_is_refused(
    client: triton.InferenceServerClient, change: dict[str, Any], message: str
):
    inputs = {name: array for name, array in {**inputs_of(1, 1, 0), **change}.items() if array is not None}
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT") as raised:
        client.infer("tiny", given(inputs))
    assert message in raised.value.message()


def test_a_model_is_loaded_and_unloaded(folder: Path, client: triton.InferenceServerClient):
    (folder / "other" / "1").mkdir(parents=True)
    shutil.copy(folder / "tiny.pt2", folder / "other" / "1" / "model.pt2")
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        client.load_model("other", config="{}", files={"file:1/model.pt2": b"code"})
    client.load_model("other")
    assert client.is_model_ready("other")
    assert {model.name: model.state for model in client.get_model_repository_index().models} == {
        "tiny": "READY",
        "other": "READY",
    }
    client.unload_model("other")
    assert not client.is_model_ready("other")
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        client.infer("other", given(inputs_of(1, 1, 0)))
    states = {model.name: (model.state, model.reason) for model in client.get_model_repository_index().models}
    assert states["other"] == ("UNAVAILABLE", "unloaded")
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.load_model("nobody")
