"""examples/speech: 300 chunks of a recorded voice get eager's answers, in Python, in C++ and after save and load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import exportkit
from exportkit.precision import with_tf32
from tests.examples import example_packages, speech_example
from tests.examples.speech_example import FOLDER, recording, sound
from tests.runtime import exportkit_run
from tests.subprocesses import output_of

COUNT = 300
HEARD = 137  # of them, before a session is saved


@pytest.fixture(scope="module")
def chunks() -> Tensor:
    """[300, 512] of a voice at 16 kHz."""
    return speech_example.repeated(recording.read(sound("Front_Center")), COUNT)


@pytest.fixture(scope="module")
def eager(chunks: Tensor) -> list[float]:
    """What the module itself answers."""
    example_packages.require_weights()
    return speech_example.eager(chunks)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """On a GPU, torch would round what convolutions multiply to TF32."""
    with with_tf32(allowed=False):
        yield


def package(device: str = "cpu") -> Path:
    return example_packages.made("speech", device)


def listened(session: exportkit.Session, chunks: Tensor) -> list[float]:
    return [session(chunk[None]).item() for chunk in chunks]


def assert_close(actual: Sequence[float], expected: Sequence[float]) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_it_hears_speech_and_silence(eager: list[float]) -> None:
    assert min(eager) < 0.05
    assert sum(answer > 0.9 for answer in eager) > COUNT / 2


def test_a_session_gives_eager_s_answers(eager: list[float], chunks: Tensor, device: torch.device) -> None:
    with exportkit.load(package(device.type), str(device)) as model, model.session(streams=1) as session:
        answers = listened(session, chunks.to(device))
        assert_close(answers, eager)
        session.reset()
        assert listened(session, chunks[:20].to(device)) == answers[:20]


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """listen.cpp, built by its CMakeLists.txt."""
    return exportkit_run.build_example(FOLDER, tmp_path_factory.mktemp("listen")) / "listen"


@pytest.mark.process
def test_c_plus_plus_gives_the_same_answers(eager, chunks: Tensor, listener: Path, tmp_path: Path) -> None:
    """To the last bit those of Python, from the beginning and from a state that Python has saved."""
    samples, rest, state = tmp_path / "all.raw", tmp_path / "rest.raw", tmp_path / "state.safetensors"
    samples.write_bytes(chunks.numpy().tobytes())
    rest.write_bytes(chunks[HEARD:].numpy().tobytes())
    with exportkit.load(package()) as model, model.session(streams=1) as session:
        answers = listened(session, chunks[:HEARD])
        session.save(state)
        answers += listened(session, chunks[HEARD:])
    assert _printed(listener, package(), samples) == answers
    assert _printed(listener, package(), rest, state) == answers[HEARD:]
    assert_close(answers, eager)


def _printed(listener: Path, *arguments: Path) -> list[float]:
    said = output_of(listener, *arguments)
    return torch.tensor([float(line) for line in said.split()], dtype=torch.float32).tolist()
