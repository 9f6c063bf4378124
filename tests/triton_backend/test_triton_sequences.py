"""Methods with state in Triton: each sequence has a session, and rows of several run in one call.

A sequence has one outstanding step: several Triton 24.10 itself has not always survived.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import exportkit
from tests.runtime import stateful
from tests.runtime.isolation import eventually
from tests.serve.engine import ticker
from tests.triton_backend.triton_server import Triton, given, infer, parameter

SEQUENCES = """sequence_batching {{
  max_sequence_idle_microseconds: {idle}
  oldest {{ max_candidate_sequences: {most} }}
  state [ {{ input_name: "exportkit.session" output_name: "exportkit.session" data_type: TYPE_UINT8 dims: [ 8 ] }} ]
}}
"""


def step(triton: Triton, model: str, seed: int, sequence: Any, **flags: bool) -> torch.Tensor:
    return infer(triton.http, model, ticker.inputs(seed), sequence_id=sequence, **flags)["0"]


@pytest.fixture(scope="module")
def ticks(triton: Triton, ticker_package: Path) -> str:
    name = triton.add("ticker", ticker_package)
    assert triton.config(name)["max_batch_size"] == 16
    return name


@pytest.mark.parametrize("config", ["", "instance_group { kind: KIND_CPU count: 2 }"], ids=["one", "two"])
def test_steps_of_many_sequences_on_a_stream_are_joined(triton: Triton, ticker_package: Path, config: str) -> None:
    """Each answer is that of a session of its own, also with two instances. Ids are numbers and texts."""
    ticks, count, steps = triton.add("ticks", ticker_package, config), 24, 12
    ids = [number + 1 if number % 2 else f"s{number}" for number in range(count)]
    wanted = {}
    with exportkit.load(ticker_package) as model:
        for number in range(count):
            with model.session(batch=1) as session:
                for turn in range(steps):
                    wanted[number, turn] = session(**ticker.inputs(100 * number + turn))
    answers: queue.Queue[Any] = queue.Queue()

    def ask(number: int, turn: int) -> None:
        client.async_stream_infer(
            ticks,
            given(tritonclient.grpc, ticker.inputs(100 * number + turn)),
            request_id=f"{number}.{turn}",
            sequence_id=ids[number],
            sequence_start=turn == 0,
            sequence_end=turn == steps - 1,
        )

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{triton.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(count):
            ask(number, 0)
        for _ in range(count * steps):
            result, error = answers.get(timeout=60)
            assert error is None, error
            number, turn = map(int, result.get_response().id.split("."))
            torch.testing.assert_close(torch.from_numpy(result.as_numpy("0").copy()), wanted[number, turn])
            if turn < steps - 1:
                ask(number, turn + 1)
    counted = triton.statistics(ticks)
    assert counted["inference_count"] == count * steps
    assert max(each["batch_size"] for each in counted["batch_stats"]) > 1
    assert eventually(lambda: triton.sessions(ticks) == 0, 10)
    triton.http.unload_model(ticks)


def test_an_id_may_be_used_again(triton: Triton, ticks: str) -> None:
    """Also by a sequence whose earlier one has not ended, which begins it anew."""
    first = step(triton, ticks, 0, 7, sequence_start=True)
    step(triton, ticks, 1, 7, sequence_end=True)
    assert torch.equal(step(triton, ticks, 0, 7, sequence_start=True), first)
    step(triton, ticks, 1, 7)
    assert torch.equal(step(triton, ticks, 0, 7, sequence_start=True), first)
    assert not torch.equal(step(triton, ticks, 0, 7, sequence_end=True), first)


def test_idle_sequences_leave_no_session(triton: Triton, ticker_package: Path) -> None:
    """Of their end the backend hears nothing."""
    name = triton.add("idle", ticker_package, "max_batch_size: 8\n" + SEQUENCES.format(idle=200_000, most=16))
    for sequence in range(1, 9):
        step(triton, name, 0, sequence, sequence_start=True)
    assert triton.sessions(name) == 8
    assert eventually(lambda: triton.sessions(name) == 0, 5)
    with pytest.raises(InferenceServerException, match="START flag"):
        step(triton, name, 1, 1)
    assert step(triton, name, 0, 1, sequence_start=True, sequence_end=True).shape == (1, ticker.WIDTH)


def test_a_sequence_that_begins_again_and_again_leaves_few_sessions(triton: Triton, ticker_package: Path) -> None:
    """Twice as many as Triton has sequences: of the end of the earlier ones the backend hears nothing, too."""
    name = triton.add("again", ticker_package, "max_batch_size: 8\n" + SEQUENCES.format(idle=600_000_000, most=2))
    for _ in range(10):
        step(triton, name, 0, 1, sequence_start=True)
    assert eventually(lambda: triton.sessions(name) == 4, 10)
    triton.http.unload_model(name)


def test_an_unloaded_model_leaves_no_session(triton: Triton, ticker_package: Path) -> None:
    name = triton.add("unloaded", ticker_package)
    for sequence in range(1, 5):
        step(triton, name, 0, sequence, sequence_start=True)
    assert triton.sessions(name) == 4
    triton.http.unload_model(name)
    assert eventually(lambda: triton.sessions(name) == -1, 20)  # with the model goes its metric
    triton.load(name)
    assert triton.sessions(name) == 0
    with pytest.raises(InferenceServerException, match="START flag"):
        step(triton, name, 1, 1)


@pytest.fixture(scope="module")
def pushes(triton: Triton, recorder_package: Path) -> str:
    name = triton.add("recorder", recorder_package, parameter("method", "push"))
    assert triton.config(name)["max_batch_size"] == 0
    return name


def push(triton: Triton, model: str, rows: int, sequence: Any, **flags: bool) -> torch.Tensor:
    return infer(triton.http, model, {"x": torch.ones(rows, stateful.WIDTH)}, sequence_id=sequence, **flags)["0"]


def test_state_without_rows_has_the_sizes_of_the_first_step_and_others_leave_it(triton: Triton, pushes: str) -> None:
    eager = {rows: stateful.Recorder(rows) for rows in (1, 3)}
    for turn in range(3):
        for rows, module in eager.items():
            wanted = module.push(torch.ones(rows, stateful.WIDTH))
            answer = push(triton, pushes, rows, rows, sequence_start=turn == 0, sequence_end=turn == 2)
            torch.testing.assert_close(answer, wanted)
            if turn < 2:
                with pytest.raises(InferenceServerException, match="batch"):
                    push(triton, pushes, 2, rows)
    assert triton.sessions(pushes) == 0


def test_a_first_step_that_fails_begins_nothing(triton: Triton, pushes: str) -> None:
    """9 rows are more than the package allows. The next steps are told why."""
    with pytest.raises(InferenceServerException, match="batch"):
        push(triton, pushes, 9, "large", sequence_start=True)
    with pytest.raises(InferenceServerException, match="the sequence has no session: its first step failed"):
        push(triton, pushes, 2, "large", sequence_end=True)
    assert triton.sessions(pushes) == 0


def test_a_step_that_fails_breaks_the_session_and_says_so(triton: Triton, pushes: str) -> None:
    """The model keeps six rows; a seventh raises within the compiled code."""
    for turn in range(stateful.ROWS):
        push(triton, pushes, 1, "full", sequence_start=turn == 0)
    with pytest.raises(InferenceServerException, match="Error: ") as failed:
        push(triton, pushes, 1, "full")
    assert "SessionBrokenError" not in str(failed.value)
    with pytest.raises(InferenceServerException, match="SessionBrokenError"):
        push(triton, pushes, 1, "full", sequence_end=True)
    assert triton.sessions(pushes) == 0
