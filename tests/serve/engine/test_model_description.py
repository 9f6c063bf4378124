"""The largest request, and what a model says about itself."""

from __future__ import annotations

import msgspec
import pytest

from exportkit.package import manifest as m
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.model_description import Batching, ModelDescription
from exportkit.serve.engine.servable import Servable
from tests.package import samples
from tests.runtime import tiny
from tests.serve.engine import rows

ROW = 3 * 4 + 4 + 8 + 2 + 4 * 2  # bytes
BATCH = rows.call().dimensions[0]


def described(call: m.Call, batch: m.Dimension | None, max_rows: int, **changes: object) -> ModelDescription:
    described = {
        "name": "rows",
        "version": "7",
        "manifest": samples.manifest(methods=tiny.forward(call)),
        "batching": Batching(batch, max_rows) if batch else Batching.impossible("because"),
        "limits": BatchLimits(max_delay=0.002),
        "devices": ("cpu", "cuda:1"),
        "runners": 2,
        "weights": None,
        "method": "forward",
        "offered": Servable({"forward": "rows"}, {}),
    }
    return ModelDescription(**{**described, **changes})


@pytest.mark.parametrize(("batch", "max_rows", "expected"), [(BATCH, 32, 32), (BATCH, 5, 5), (None, 1, 32)])
def test_the_largest_inputs_are_those_of_the_greatest_sizes(batch, max_rows, expected):
    assert described(rows.call(), batch, max_rows).largest_inputs() == expected * ROW


def test_sizes_that_no_machine_holds_are_numbers_as_well():
    call = msgspec.structs.replace(rows.call(), dimensions=(m.Dimension(name="batch", min=1, max=2**62),))
    assert described(call, None, 1).largest_inputs() == 2**62 * ROW


def test_the_configuration_is_tritons():
    """tritonclient's own message takes every key, so that no name or type is ours."""
    json_format = pytest.importorskip("google.protobuf.json_format")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    for batch in (BATCH, None):
        config = described(rows.call(), batch, 8, weights="tuned.safetensors").config()
        parsed = json_format.ParseDict(config, model_config.ModelConfig())
        assert parsed.max_batch_size == (8 if batch else 0)
        assert [group.count for group in parsed.instance_group] == [2, 2]
        assert list(parsed.instance_group[1].gpus) == [1]
        assert parsed.parameters["weights"].string_value == "tuned.safetensors"
        assert parsed.HasField("dynamic_batching") == bool(batch)
    assert described(rows.call(), BATCH, 8).config()["dynamic_batching"]["max_queue_delay_microseconds"] == 2000
