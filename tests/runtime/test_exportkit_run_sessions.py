"""exportkit-run with methods and state: recorded sequences, calls from a file, times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exportkit.errors import InputError, UsageError
from tests.runtime import exportkit_run, sequences
from tests.runtime.stateful import WIDTH, Recorder


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return sequences.write(tmp_path_factory.mktemp("sequences") / "recorder.pt2", sequences.tensors())


def test_it_replays_a_sequence_in_one_session_and_says_what_it_compared(package):
    text = exportkit_run.run(package, json_output=False).document["text"]
    assert "  push takes, in a session, x: float32[batch, 4]\n" in text
    assert "  fill takes x: float32[batch, 4], out: float32[batch, 4], written\n" in text
    assert "  remembers cache: float32[batch, 6, 4], position: int64[], gain: float32[batch, 4]\n" in text
    assert "  case 0: 5 calls in one session: ok\n    push (batch=2): ok\n" in text
    assert "    state after the last call\n      ok  cache: 0 of 48 elements differ" in text


@pytest.mark.slow_but("3.written*", "state.0")
@pytest.mark.parametrize("wrong", ["1.output.0", "3.written.1", "4.output.0", "state.0", "state.1", "state.2"])
def test_what_differs_is_named(tmp_path, wrong):
    recorded = sequences.tensors()
    recorded[wrong].view(-1)[-1] += 1
    answer = exportkit_run.run(sequences.write(tmp_path / "wrong.pt2", recorded))
    assert answer.code == 1
    (case,) = answer.document["cases"]
    results = [(i, output) for i, call in enumerate(case["calls"]) for output in call["outputs"]]
    results += [(None, tensor) for tensor in case["state"]]
    names = {"output": "0", "written": "written.out"}
    place = wrong.split(".")
    number = None if place[0] == "state" else int(place[0])
    name = ("cache", "position", "gain")[int(place[1])] if number is None else names[place[1]]
    assert [(i, result["name"], result["mismatched"]) for i, result in results if result["mismatched"]] == [
        (number, name, 1)
    ]


def test_a_sequence_without_its_state_is_compared_up_to_there(tmp_path):
    recorded = {name: tensor for name, tensor in sequences.tensors().items() if not name.startswith("state")}
    (case,) = exportkit_run.load(sequences.write(tmp_path / "stateless.pt2", recorded))["cases"]
    assert (case["ok"], case["state"]) == (True, [])


def test_a_method_is_run_on_inputs_of_a_file(package, tmp_path):
    row, out = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    save_file({"x": row, "out": out}, tmp_path / "in.safetensors")
    options = ["--input", tmp_path / "in.safetensors", "--output", tmp_path / "out.safetensors"]
    document = exportkit_run.load(package, "--method", "fill", *options)
    assert document["outputs"] == {"0": [2], "written.out": [2, 4]}
    written = load_file(tmp_path / "out.safetensors")
    torch.testing.assert_close(written["0"], Recorder().fill(row, out))
    torch.testing.assert_close(written["written.out"], out)


def test_a_method_with_state_is_run_in_a_session_of_the_given_size(package, tmp_path):
    row = torch.randn(3, WIDTH)
    save_file({"x": row}, tmp_path / "in.safetensors")
    options = ["--method", "push", "--input", tmp_path / "in.safetensors"]
    exportkit_run.load(package, *options, "--session", "batch=3", "--output", tmp_path / "out.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["0"], Recorder(3).push(row))
    with pytest.raises(UsageError, match="batch must be from 1 to 8, got nothing"):
        exportkit_run.load(package, *options)
    with pytest.raises(InputError, match="the session has batch = 2"):
        exportkit_run.load(package, *options, "--session", "batch=2")


@pytest.mark.slow_but("push")
@pytest.mark.parametrize("method", ["push", "peek", "embed", "fill"])
def test_it_times_a_method_on_copies_of_its_session(package, method):
    bench = exportkit_run.load(package, "--method", method, "--bench", "0.5", "--threads", "2")["bench"]
    assert (bench["method"], bench["threads"]) == (method, 2)
    assert bench["calls"] > 12  # more than the session has room for
    assert 0 < bench["median_ms"] <= bench["p99_ms"]
