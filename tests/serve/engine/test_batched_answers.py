"""What is batched, or runs beside others, has the answers of the package."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.package.structure import flatten
from tests.artifacts import artifact
from tests.serve.engine.asking import equal, request, serving_model, tensors


@pytest.fixture(params=["rows", pytest.param("arr_coc", marks=pytest.mark.slow)])
def package(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_package")


async def test_batched_answers_are_bit_for_bit_the_packages(package):
    """Every row of every recorded case is asked for by itself, all at the same time, in turns of sizes."""
    direct = exportkit.load(package)
    call = direct.manifest.call
    names = [each.name for each in call.outputs]
    given = [each.name for each in call.inputs]
    cases = [dict(zip(given, (*case.args, *case.kwargs.values()))) for case in direct.cases]
    singles = [
        {name: tensor[row : row + 1] for name, tensor in case.items()}
        for case in cases
        for row in range(len(case[given[0]]))
    ]
    asked = [*cases, *singles] * 2
    async with serving_model(package) as model:
        batching = model.metadata()["batching"]
        assert (batching["enabled"], batching["bit_equal"]) == (True, True)
        assert batching["max_rows"] == next(each.max for each in call.dimensions if each.name == "batch")
        answers = await asyncio.gather(*(model.infer(request(each)) for each in asked))
    assert model.counted.executions < len(asked)
    for inputs, answer in zip(asked, answers):
        assert equal(tensors(answer), dict(zip(names, flatten(direct(**inputs), torch.is_tensor)[1])))
    direct.close()


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
