"""How many batches run at the same time, and that a GPU's runners answer as direct calls do."""

from __future__ import annotations

import asyncio

import pytest
import torch

import exportkit
from tests.artifacts import artifact
from tests.serve.engine.asking import request, serving_model, tensors


@pytest.mark.cuda
@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("runtime", ["cpp", "python"])
async def test_runners_on_cuda_answer_as_direct_calls_do(isolate, runtime, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
    package = artifact("weighted-cuda")
    inputs = [torch.randn(1 + count % 3, 16) for count in range(100)]
    async with serving_model(package, devices=("cuda",), isolate=isolate) as model:
        assert model.counted.runners == 2
        answers = await asyncio.gather(*(model.infer(request({"x": each})) for each in inputs))
        executions, kind = model.counted.executions, model.config()["instance_group"][0]["kind"]
    assert (executions < 100, kind) == (runtime == "cpp", "KIND_GPU")
    with exportkit.load(package, device="cuda") as direct:
        for each, answer in zip(inputs, answers):
            (output,) = tensors(answer).values()
            torch.testing.assert_close(output, direct(each.cuda()).cpu())
