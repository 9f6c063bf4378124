"""Other weights replace a package's while clients ask: each answer is of the old ones or of the new ones."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch

import exportkit
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.statuses import BackendError
from tests.artifacts import artifact
from tests.runtime.fine_tunes import X, save, state
from tests.serve.engine.asking import only, request, serving, tensors


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
async def test_weights_are_exchanged_under_load(tmp_path, isolate):
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(artifact("weighted"), folder / "weighted.pt2")
    save(folder / "tuned.safetensors", state(1))
    save(folder / "other.safetensors", {"x": torch.zeros(1)})
    with exportkit.load(folder / "weighted.pt2", device="cpu") as model:
        old = model(X)
        model.swap_weights(folder / "tuned.safetensors")
        new = model(X)
    assert not torch.equal(old, new)
    batch = BatchLimits(max_rows=3)  # with batches of more rows, the last bits may differ
    async with serving(repository=folder, devices=("cpu",), batch=batch, isolate=isolate) as repository:
        seen, stop = [], False

        async def answer():
            (output,) = tensors(await repository.model("weighted").infer(request({"x": X}))).values()
            return output

        async def client():
            while not stop:
                output = await answer()
                assert torch.equal(output, old) or torch.equal(output, new)
                seen.append(torch.equal(output, new))

        clients = [asyncio.ensure_future(client()) for _ in range(2)]
        await repository.load("weighted", {"weights": "tuned.safetensors"})
        assert torch.equal(await answer(), new)
        parameters = only(repository).config()["parameters"]
        assert parameters["weights"] == {"string_value": "tuned.safetensors"}
        with pytest.raises(BackendError, match="the model weighted cannot be loaded"):
            await repository.load("weighted", {"weights": "other.safetensors"})
        assert torch.equal(await answer(), new)
        same = '{"parameters": {"weights": {"string_value": "tuned.safetensors"}}}'  # as Triton's clients can say it
        before = only(repository)
        await repository.load("weighted", {"config": same})
        assert only(repository) is before  # they are there already
        await repository.load("weighted", {})
        assert torch.equal(await answer(), old)
        stop = True
        await asyncio.gather(*clients)
        counted = only(repository).counted
    assert seen[0] is False
    assert any(seen)  # some answers came from the new weights while calls went on
    assert counted.failures == {}
