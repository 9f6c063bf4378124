from __future__ import annotations

import contextlib
import itertools
import time

import pytest
import torch

from exportkit.bench.timing import Alternative, measure

CPU = torch.device("cpu")


def test_alternatives_take_turns_in_changing_orders_and_inputs_rotate():
    seen = []

    def slow(name, number):
        seen.append((name, number))
        time.sleep(1e-3)

    alternatives = [
        Alternative(name, name, [lambda name=name, i=i: slow(name, i) for i in range(2)]) for name in ("a", "b", "c")
    ]
    measured = measure(alternatives, CPU, 1e-3)
    timed = seen[3 * 2 + 3 : -3]  # after the warm-up and the estimates, before the memory is counted
    rounds = [tuple(name for name, _ in timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    names = [name for name, _ in timed]
    assert {"a", "c"} <= {before for before, name in itertools.pairwise(names) if name == "b"}
    assert [number for name, number in timed if name == "a"] == [0, 1, 0, 1, 0]
    for measurement in measured:
        assert measurement.call.count == 5
        assert 1 <= measurement.call.median < 20


def test_the_state_that_a_call_needs_is_entered_outside_of_the_time_taken():
    state = []

    @contextlib.contextmanager
    def slowly():
        time.sleep(50e-3)
        state.append("entered")
        yield
        state.clear()

    def call():
        assert state
        time.sleep(2e-3)

    (found,) = measure([Alternative("a", "a", [call], slowly)], CPU, 1e-3)
    assert 2 <= found.call.median < 50


def test_the_peak_counts_what_lives_at_one_time():
    x = torch.ones(1 << 20)

    def call():
        y = x + 1
        y = y * 2
        return y - 1

    (found,) = measure([Alternative("a", "a", [call])], CPU, 1e-3)
    assert found.peak_bytes == pytest.approx(2 * x.nbytes, rel=0.01)


def test_short_calls_are_timed_several_at_a_time_and_alternatives_as_many():
    counts = {"short": 0, "long": 0}

    def call(name, seconds):
        counts[name] += 1
        if seconds:  # even a sleep of none lets others run
            time.sleep(seconds)

    def alternatives(*chosen):
        return [Alternative(name, name, [lambda name=name, s=s: call(name, s)]) for name, s in chosen]

    (found,) = measure(alternatives(("short", 0)), CPU, 1e-3)
    assert counts.pop("short") > 10 * found.call.count
    assert found.call.median < 0.1
    counts["short"] = 0
    measure(alternatives(("short", 1e-5), ("long", 2e-3)), CPU, 1e-3)
    assert counts["long"] == counts["short"] > 5


@pytest.mark.cuda
def test_on_cuda_the_kernels_are_replayed_from_a_graph():
    torch.cuda.manual_seed(1)
    drawn = [torch.randn(3, device="cuda") for _ in range(2)]
    torch.cuda.manual_seed(1)
    torch.randn(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(1 << 20, device="cuda")
        alternatives = [
            Alternative("add", "", [lambda: x + 1]),
            Alternative("synchronises", "", [lambda: (x + 1)[0].item()]),
        ]
        added, synchronised = measure(alternatives, x.device, 0.01)
    assert 0 < added.kernels.median <= added.call.median
    assert added.peak_bytes == x.nbytes
    assert synchronised.kernels is None
    assert "no CUDA graph" in synchronised.note
    # The generator goes on, though torch believes that a capture is going on after one that failed.
    torch.testing.assert_close(torch.randn(3, device="cuda"), drawn[1], rtol=0, atol=0)
