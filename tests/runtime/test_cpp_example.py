"""examples/cpp: a program of one's own over the C++ runtime, built as its CMakeLists.txt says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.runtime import exportkit_run, sequences

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the programs."""
    return exportkit_run.build_example(EXAMPLE, tmp_path_factory.mktemp("cpp"))


def test_the_example_of_sessions_runs_a_sequence(built, tmp_path):
    package = sequences.write(tmp_path / "recorder.pt2", sequences.tensors())
    command = [built / "session", package, tmp_path / "state.safetensors"]
    environment = {"EXPORTKIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "push needs a session", "peek needs a session", "embed needs no session", "fill needs no session",
        "ran push: [2, 4]", "ran peek: [2, 4]", "ran embed: [2, 4]", "ran fill: [2]", "ran push: [2, 4]",
        "after reset: another state", "after load_state: the same state, 232 bytes",
    ]  # fmt: skip


def test_the_example_is_built_and_runs_a_package(built, tiny_package, tmp_path):
    environment = {"EXPORTKIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [built / "predict", tiny_package], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny 1 on cpu\ntakes:\n  image float32 batch 3 16*gh 8\n")
    assert "case 0: ok\ncase 1: ok\ngot [1, 3]\n" in done.stdout

    done = subprocess.run(
        [built / "predict", tiny_package, "new.safetensors"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("WeightsError: tiny has no weights outside its compiled code")

    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(tiny_package.read_bytes()[:-1])
    done = subprocess.run([built / "predict", damaged], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("NotAnArchiveError: ")
