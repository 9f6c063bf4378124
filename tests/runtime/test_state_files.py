"""A saved state goes on in another process, and a file that is not this session's state changes nothing."""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import exportkit
from exportkit.errors import StateError, UsageError
from tests.runtime import stateful
from tests.runtime.stateful import WIDTH, bits
from tests.subprocesses import run_python


@pytest.fixture
def model(every_recorder: Any) -> Any:
    """By each way of Python, and through the C interface."""
    return every_recorder


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
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
        after = bits(session.state)
    assert bits(load_file(tmp_path / "after.safetensors")) == after
    with model.session(batch=2) as session:
        session.load_state(tmp_path / "after.safetensors")
        assert bits(session.state) == after


def test_a_file_is_its_owners_says_whose_state_it_is_and_replaces_another_whole(model, saved):
    with safe_open(saved, framework="pt") as file:
        said = file.metadata()
    assert said["exportkit.model"] == "recorder"
    assert len(said["exportkit.state"]) == 64
    with model.session(batch=2) as session:
        session.save(saved)
        assert not load_file(saved)["cache"].any()
    assert os.listdir(saved.parent) == [saved.name]  # no temporary file is left
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600  # what a model remembers may be private


def test_a_state_with_nan_is_a_state(model, tmp_path):
    with model.session(batch=2) as session, model.session(batch=2) as other:
        session.push(torch.full((2, WIDTH), float("nan")))
        session.save(tmp_path / "nan.safetensors")
        other.load_state(tmp_path / "nan.safetensors")
        assert bits(other.state) == bits(session.state)
        assert other.state["cache"].isnan().any()


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"gain": None}, {}, "has no tensor gain"),
        ({"position": None, "counter": torch.tensor(1)}, {}, "has no tensor position"),  # an alias is no name
        ({"more": torch.ones(1)}, {}, "has the tensor 'more', which is not in the state of recorder"),
        ({"gain": torch.ones(2, 4).double()}, {}, r"gain is float64\[2, 4\]; the session's is float32\[2, 4\]"),
        ({"position": torch.tensor([1])}, {}, r"position is int64\[1\]; the session's is int64\[\]"),
        ({}, {"exportkit.model": "llama"}, "has the state of the model 'llama'; this is recorder"),
        ({}, {"exportkit.state": "0" * 64}, "has the state of another recorder: the names, dtypes or shapes differ"),
        ({}, None, "does not say which model's state it has"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(model, saved, tensors, metadata, message):
    with safe_open(saved, framework="pt") as file:
        said = {} if metadata is None else file.metadata() | metadata
    changed = {name: tensor for name, tensor in (load_file(saved) | tensors).items() if tensor is not None}
    save_file(changed, saved, metadata=said)
    refused(model, saved, message)


def test_a_state_of_other_sizes_is_refused(model, saved):
    refused(model, saved, r"cache is float32\[2, 6, 4\]; the session's is float32\[3, 6, 4\]", batch=3)


def refused(model: Any, path: Path, message: str, batch: int = 2) -> None:
    with model.session(batch=batch) as session:
        session.push(torch.ones(batch, WIDTH))
        before = bits(session.state)
        with pytest.raises(StateError, match=message) as error:
            session.load_state(path)
        assert error.value.exit_code == 2
        assert bits(session.state) == before
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
        refused(model, saved, "is not a safetensors file|cannot read the state")
    saved.unlink()
    refused(model, saved, "cannot read the state .*No such file")
    saved.mkdir()
    refused(model, saved, "cannot read the state|is not a safetensors file")


def test_the_state_of_another_package_of_the_same_name_is_refused(tmp_path, saved):
    described, _ = stateful.state()
    other = tuple(msgspec.structs.replace(each, name=f"my.{each.name}", aliases=()) for each in described)
    with (
        exportkit.load(stateful.write(tmp_path / "other.pt2", state=other)) as stranger,
        stranger.session(batch=2) as session,
        pytest.raises(StateError, match="has the state of another recorder"),
    ):
        session.load_state(saved)


def test_a_folder_that_is_not_there_is_named(recorder, tmp_path):
    with recorder.session(batch=2) as session, pytest.raises(UsageError, match="there is no folder"):
        session.save(tmp_path / "nowhere" / "state.safetensors")
