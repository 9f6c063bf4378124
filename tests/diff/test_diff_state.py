"""Methods and state are compared by name, and recorded sequences call by call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from exportkit.cli import main
from exportkit.diff.comparing import compare_artifacts
from exportkit.diff.difference import Comparison
from exportkit.package import manifest as m
from exportkit.package.archive import write_package
from tests.artifacts import artifact
from tests.package import stateful_samples as samples

Compared = Callable[..., Comparison]


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    """Compares the sample with one that has other records and other keys."""

    def compare(records: dict[str, bytes] | None = None, without: str = "", **changes: Any) -> Comparison:
        write_package(tmp_path / "a.pt2", samples.manifest(), samples.RECORDS)
        other = {name: data for name, data in {**samples.RECORDS, **(records or {})}.items() if name != without}
        write_package(tmp_path / "b.pt2", samples.manifest(**changes), other)
        return compare_artifacts(tmp_path / "a.pt2", tmp_path / "b.pt2")

    return compare


def found(comparison: Comparison) -> set[tuple[str, str, str | None]]:
    return {(each.part, each.what, each.effect) for each in comparison.differences if each.part != "sizes"}


def state(**changes: Any) -> tuple[m.StateTensor, ...]:
    cache, step = samples.state()
    return msgspec.structs.replace(cache, **changes), step


def test_a_package_with_state_is_the_same_as_itself(compared: Compared) -> None:
    assert compared().same
    assert found(compared()) == set()


def test_state_is_compared_by_name(compared: Compared) -> None:
    loose = m.OutputTolerance(rtol=1e-3, atol=1e-3)
    assert found(compared(state=state(tolerance=loose))) == {("state", "cache.keys: tolerance", None)}
    assert found(compared(state=state(aliases=()))) == {("state", "cache.keys: aliases", None)}


def test_the_first_values_of_state_are_compared(compared: Compared) -> None:
    row = np.arange(4, dtype=np.float32)
    row[2] += 0.25
    record = f"exportkit/state/{hashlib.sha256(row.tobytes()).hexdigest()}"
    comparison = compared({record: row.tobytes()}, without=samples.INITIAL, state=state(initial=record))
    (changed,) = (each for each in comparison.differences if each.part == "state")
    assert (changed.what, changed.max_abs, changed.effect) == ("initial value of cache.keys", 0.25, "answer")
    zeros = compared(without=samples.INITIAL, state=state(initial=None))
    assert [each.max_abs for each in zeros.differences if each.part == "state"] == [3.0]


def test_methods_are_compared_by_name(compared: Compared) -> None:
    plain, decode = samples.manifest().methods
    uses = (decode.state[0], msgspec.structs.replace(decode.state[1], written=False))
    comparison = compared(methods=(plain, msgspec.structs.replace(decode, state=uses)))
    assert found(comparison) == {("call", "decode: state cache.keys", "answer")}
    token = msgspec.structs.replace(decode.call.inputs[0], dtype="int32")
    call = msgspec.structs.replace(decode.call, inputs=(token, *decode.call.inputs[1:]))
    sequence = save({**samples.sequence(), **{f"{i}.input.0": np.array([1, 2], np.int32) for i in (0, 2)}})
    comparison = compared({samples.SEQUENCE: sequence}, methods=(plain, msgspec.structs.replace(decode, call=call)))
    assert ("call", "decode: input token", "answer") in found(comparison)


def test_another_build_of_a_methods_code_is_named(compared: Compared) -> None:
    comparison = compared({samples.CODE: b"\x7fELF another build"})
    assert found(comparison) == {("targets", "decode.cpu_v3: file model.wrapper.so", "answer")}


def test_sequences_are_compared_call_by_call(compared: Compared) -> None:
    sequence = samples.sequence()
    sequence["2.output.0"] = sequence["2.output.0"] + 1
    sequence["0.written.1"] = sequence["0.written.1"] + 2
    sequence["state.0"] = sequence["state.0"] + 4
    comparison = compared({samples.SEQUENCE: save(sequence)})
    assert {each.what: each.max_abs for each in comparison.differences if each.part == "cases"} == {
        "case 1: call 2 (decode) output 0": 1,
        "case 1: call 0 (decode) output written.scratch": 2,
        "case 1: state cache.keys": 4,
    }
    assert comparison.same


@pytest.mark.process
def test_the_graphs_of_methods_are_compared_and_sequences_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = artifact("decoder-program")
    assert main(["diff", str(path), str(path), "--run", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["differences"] == []
    assert said["notes"] == []
    assert len(said["answers"]["checks"]) == 8
    assert all(check["same"] for check in said["answers"]["checks"])
    assert "prefill, 4 times decode" in said["answers"]["checks"][-1]["case"]
