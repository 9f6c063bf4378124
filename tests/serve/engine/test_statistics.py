"""What is counted is what the protocol's statistics say."""

from __future__ import annotations

from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.protocol.inference import InferTiming


def test_durations_are_sums_in_nanoseconds():
    counted = Statistics()
    for seconds in (0.5, 1.5):
        counted.succeeded(InferTiming(0.25, 0.125, 0.0625, 0.03125, 3), seconds)
    counted.failed("full")
    counted.failed("deadline", 0.5)
    counted.executed(3, compute_input=0.125, compute_infer=0.0625, compute_output=0.03125)
    told = counted.to_json("m", "1")
    assert told["inference_stats"]["success"] == {"count": 2, "ns": 2_000_000_000}
    assert told["inference_stats"]["fail"] == {"count": 2, "ns": 500_000_000}
    assert told["inference_stats"]["queue"] == {"count": 2, "ns": 500_000_000}
    assert told["inference_stats"]["compute_infer"] == {"count": 2, "ns": 125_000_000}
    (batch,) = told["batch_stats"]
    assert (batch["batch_size"], batch["compute_input"]) == (3, {"count": 1, "ns": 125_000_000})
    assert (told["inference_count"], told["execution_count"]) == (3, 1)


def test_clients_cannot_make_the_list_of_batches_long():
    counted = Statistics()
    for rows in range(1, 5000):
        counted.executed(rows, compute_input=0, compute_infer=0, compute_output=0)
    assert len(counted.batches) == 256 + 5
    assert max(counted.batches) == 8192
    assert counted.rows == 5000 * 4999 // 2
