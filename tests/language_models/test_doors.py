"""Language models by both doors, `spec` and as they are, give what eager gives at batches of 1, 2 and 8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import llm
from exportkit import ExportSpec
from exportkit.transformers import spec
from tests.export.function_models import traced

NAMES = (*llm.SIX, "mistral", "gemma2", "qwen3_moe", "lfm2", "llama4", "bamba")


def as_it_is(model: Any, batch: int) -> ExportSpec:
    shapes = {1: "count[2:24]"} | ({0: f"batch[1:{batch}]"} if batch > 1 else {})
    tokens = torch.randint(1, llm.VOCABULARY, (min(batch, 2), 9))
    inputs = {"input_ids": tokens, "use_cache": False, "return_dict": True}
    return ExportSpec(model=model, example_kwargs=inputs, dynamic_shapes={"input_ids": shapes})


def in_steps(model: Any, batch: int) -> ExportSpec:
    return spec(model, cache_length=32, prompt=12, batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("door", [as_it_is, in_steps])
@pytest.mark.parametrize("name", NAMES)
def test_any_batch_traces_and_answers_as_eager(name: str, door: Any, batch: int) -> None:
    made = door(llm.small_model(name), batch)
    found = traced(made, cases=3, edge_cases=False)
    for method in found.methods:
        ends = {dimension.name: (dimension.min, dimension.max) for dimension in method.call.dimensions}
        assert ends.get("batch", (1, 1)) == (1, batch)
