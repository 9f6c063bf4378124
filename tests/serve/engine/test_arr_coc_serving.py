"""ARR-COC is batched, and its answers are the same to the last bit."""

from __future__ import annotations

import asyncio

import pytest
import torch

import exportkit
from exportkit.package.structure import flatten
from tests.serve.engine.asking import equal, only, request, serving, tensors


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 500))


def flat(model, answer):
    return dict(zip((each.name for each in model.manifest.call.outputs), flatten(answer, torch.is_tensor)[1]))


@pytest.fixture(scope="module")
def direct(arr_coc_package):
    with exportkit.load(arr_coc_package) as model:
        yield model


def test_batched_answers_are_bit_for_bit_the_packages(arr_coc_package, direct):
    """Every row of every recorded case is asked for by itself, all at the same time, in turns of sizes."""
    cases = [dict(zip(("image", "query"), (*case.args, *case.kwargs.values()))) for case in direct.cases]
    singles = [
        {name: tensor[row : row + 1] for name, tensor in case.items()}
        for case in cases
        for row in range(len(case["image"]))
    ]
    asked = [*cases, *singles] * 2

    async def ask():
        async with serving(arr_coc_package) as repository:
            model = only(repository)
            batching = model.metadata()["batching"]
            assert (batching["enabled"], batching["bit_equal"], batching["max_rows"]) == (True, True, 64)
            answers = await asyncio.gather(*(model.infer(request(each)) for each in asked))
            return answers, model.counted

    answers, counted = run(ask())
    assert counted.executions < len(asked)
    for inputs, answer in zip(asked, answers):
        assert equal(tensors(answer), flat(direct, direct(**inputs)))
