"""Which models are batched, where the C++ runtime finds that rows are independent, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.json_format import ParseDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

from exportkit.serve.batching.pending import BatchLimits
from tests.serve.engine.asking import serving_model

ROW = 3 * 4 + 4 + 8 + 2 + 4 * 2  # bytes
DELAY = BatchLimits(max_delay=0.002)


async def metadata(package, most_bytes=32 * ROW, **options):
    """What a model says of batches, and its configuration, as which tritonclient takes every key."""
    async with serving_model(package, **options) as model:
        assert model.max_body == most_bytes
        on_both = replace(model._described, devices=("cpu", "cuda:1"), runners=2).config()
        groups = ParseDict(on_both, ModelConfig()).instance_group
        assert [(group.count, list(group.gpus)) for group in groups] == [(2, []), (2, [1])]
        return model.metadata()["batching"], model.config()


async def test_independent_rows_are_batched(rows_package):
    batching, config = await metadata(rows_package, batch=DELAY)
    assert batching == {"enabled": True, "reason": None, "dimension": "batch", "max_rows": 32, "bit_equal": True}
    assert config["max_batch_size"] == 32
    assert [each["dims"] for each in config["input"]] == [[3], [1], [], [2], [2, 2]]
    assert [each["data_type"] for each in config["output"]] == ["TYPE_FP32", "TYPE_INT64", "TYPE_BOOL", "TYPE_BF16"]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000


async def test_rows_that_influence_one_another_are_not_batched(coupled_package):
    batching, config = await metadata(coupled_package)
    assert not batching["enabled"]
    assert "rows influence one another: sum" in batching["reason"]
    assert batching["max_rows"] == 1
    assert config["max_batch_size"] == 0
    assert "dynamic_batching" not in config
    assert config["input"][0]["dims"] == [-1, 3]
    assert "influence one another" in config["parameters"]["batching"]["string_value"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"warm_up": False}, "the warm-up is off"),
        ({"batch": BatchLimits(max_rows=1)}, "batches have at most 1 rows"),
    ],
)
async def test_what_was_not_shown_is_not_batched(rows_package, options, reason):
    batching, _ = await metadata(rows_package, **options)
    assert not batching["enabled"]
    assert reason in batching["reason"]


async def test_torchs_own_binding_runs_each_request_alone(rows_package, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "python")
    batching, _ = await metadata(rows_package)
    assert batching["reason"] == "only the C++ runtime finds out whether rows influence one another"
