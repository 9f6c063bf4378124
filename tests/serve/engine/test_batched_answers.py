"""What is batched has the answers of the package to the last bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.package.structure import flatten
from tests.serve.engine import asking
from tests.serve.engine.asking import equal, serving_model, tensors


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
        answers = await asyncio.gather(*(model.infer(asking.request(each)) for each in asked))
    assert model.counted.executions < len(asked)
    for inputs, answer in zip(asked, answers):
        assert equal(tensors(answer), dict(zip(names, flatten(direct(**inputs), torch.is_tensor)[1])))
    direct.close()
