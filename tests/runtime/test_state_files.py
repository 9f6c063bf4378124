"""A saved state goes on in another process, and a file that is not this session's state changes nothing."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import exportkit
from exportkit.errors import StateError, UsageError
from tests.runtime import stateful
from tests.runtime.stateful import WIDTH, bits
from tests.subprocesses import run_python


@pytest.fixture(scope="module", params=["here", "isolated"])
def model(request: pytest.FixtureRequest, recorder_package: Path, runtime: str) -> Iterator[exportkit.Model]:
    with exportkit.load(recorder_package, isolate=request.param == "isolated") as model:
        yield model


@pytest.fixture
def saved(model: exportkit.Model, tmp_path: Path) -> Path:
    """The state of a session of two rows after a call."""
    with model.session(batch=2) as session:
        session.push(torch.ones(2, WIDTH))
        session.save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


def test_a_session_goes_on_in_another_process_bit_for_bit(model, recorder_package, tmp_path):
    rows = torch.randn(2, WIDTH)
    with model.session(batch=2) as session:
        session.push(rows)
        session.save(tmp_path / "state.safetensors")
        expected = session.push(rows)
        code = """
import sys, exportkit, torch
from safetensors.torch import load_file
with exportkit.load(sys.argv[1]) as model, model.session(batch=2) as session:
    session.load_state("state.safetensors")
    answer = session.push(load_file("rows.safetensors")["rows"])
    session.save("after.safetensors")
    print(answer.numpy().tobytes().hex())
"""
        save_file({"rows": rows}, tmp_path / "rows.safetensors")
        assert run_python(code, recorder_package, cwd=tmp_path) == expected.numpy().tobytes().hex() + "\n"
        assert bits(load_file(tmp_path / "after.safetensors")) == bits(session.state)


def test_a_state_is_its_owners_alone(saved: Path) -> None:
    """What a model remembers may be private."""
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert list(saved.parent.iterdir()) == [saved]


def test_a_file_says_whose_state_it_is_and_replaces_another_whole(model, saved):
    with safe_open(saved, framework="pt") as file:
        said = file.metadata()
    assert said["exportkit.model"] == "recorder"
    assert len(said["exportkit.state"]) == 64
    with model.session(batch=2) as session:
        session.save(saved)
        assert not load_file(saved)["cache"].any()
    assert os.listdir(saved.parent) == [saved.name]  # no temporary file is left
    with model.session(batch=2) as session, pytest.raises(UsageError, match="there is no folder"):
        session.save(saved.parent / "nowhere" / "state.safetensors")


def test_a_state_with_nan_is_a_state(model, tmp_path):
    with model.session(batch=2) as session, model.session(batch=2) as other:
        session.push(torch.full((2, WIDTH), float("nan")))
        session.save(tmp_path / "nan.safetensors")
        other.load_state(tmp_path / "nan.safetensors")
        assert bits(other.state) == bits(session.state)
        assert other.state["cache"].isnan().any()


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, said: tensors.pop("gain"), "does not have the tensors of the state: gain"),
        (lambda tensors, said: tensors.update(more=torch.ones(1)), "does not have the tensors of the state: more"),
        (
            lambda tensors, said: tensors.update(gain=tensors["gain"].double()),
            r"gain in .* is float64\[2, 4\]; this session's is float32\[2, 4\]",
        ),
        (
            lambda tensors, said: tensors.update(position=tensors["position"].reshape(1)),
            r"position in .* is int64\[1\]; this session's is int64\[\]",
        ),
        (lambda tensors, said: said.update({"exportkit.model": "llama"}), "another model: exportkit.model is llama"),
        (lambda tensors, said: said.update({"exportkit.state": "0" * 64}), "another model: exportkit.state is 000"),
        (lambda tensors, said: said.clear(), "is no state of a session: it has no exportkit.state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(model, saved, change, message):
    rewritten(saved, change)
    refused(model, saved, message)


def test_a_state_of_other_sizes_is_refused(model, saved):
    refused(model, saved, r"cache in .* is float32\[2, 6, 4\]; this session's is float32\[3, 6, 4\]", batch=3)


def refused(model: exportkit.Model, path: Path, message: str, batch: int = 2) -> None:
    with model.session(batch=batch) as session:
        session.push(torch.ones(batch, WIDTH))
        before = bits(session.state)
        with pytest.raises(StateError, match=message) as error:
            session.load_state(path)
        assert error.value.exit_code == 2
        assert bits(session.state) == before
        assert not session.broken
        session.push(torch.ones(batch, WIDTH))


def test_a_damaged_file_is_refused_and_changes_nothing(model, saved):
    content = saved.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header["cache"]["data_offsets"] = [0, 1 << 40]
    far = json.dumps(header).encode()
    for damaged in (
        b"",
        content[:-1],
        content[: 8 + length],
        content + b"\0",
        b"\xff" * 8 + content[8:],
        struct.pack("<Q", len(far)) + far + content[8 + length :],
        b"PK\x03\x04" + content,
    ):
        saved.write_bytes(damaged)
        refused(model, saved, "is not a whole safetensors file|cannot read the state")
    saved.unlink()
    refused(model, saved, "cannot read the state .*No such file")
    saved.mkdir()
    refused(model, saved, "cannot read the state|is not a whole safetensors file")


def test_the_state_of_another_package_of_the_same_name_is_refused(model, tmp_path, saved):
    import msgspec

    described, _ = stateful.state()
    other = tuple(msgspec.structs.replace(each, name=f"my.{each.name}", aliases=()) for each in described)
    package = stateful.write(tmp_path / "other.pt2", state=other)
    with exportkit.load(package) as stranger:
        refused_by = "another model: exportkit.state is"
        with stranger.session(batch=2) as session, pytest.raises(StateError, match=refused_by):
            session.load_state(saved)
