"""ARR-COC is batched, and its answers are the same to the last bit."""

from __future__ import annotations

import asyncio

import torch

import exportkit
from exportkit.package.structure import flatten
from tests.serve.engine.asking import equal, request, serving_model, tensors


async def test_batched_answers_are_bit_for_bit_the_packages(arr_coc_package):
    """Every row of every recorded case is asked for by itself, all at the same time, in turns of sizes."""
    direct = exportkit.load(arr_coc_package)
    names = [each.name for each in direct.manifest.call.outputs]
    cases = [dict(zip(("image", "query"), (*case.args, *case.kwargs.values()))) for case in direct.cases]
    singles = [
        {name: tensor[row : row + 1] for name, tensor in case.items()}
        for case in cases
        for row in range(len(case["image"]))
    ]
    asked = [*cases, *singles] * 2
    async with serving_model(arr_coc_package) as model:
        batching = model.metadata()["batching"]
        assert (batching["enabled"], batching["bit_equal"], batching["max_rows"]) == (True, True, 64)
        answers = await asyncio.gather(*(model.infer(request(each)) for each in asked))
    assert model.counted.executions < len(asked)
    for inputs, answer in zip(asked, answers):
        assert equal(tensors(answer), dict(zip(names, flatten(direct(**inputs), torch.is_tensor)[1])))
    direct.close()
