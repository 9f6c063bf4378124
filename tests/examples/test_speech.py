"""examples/speech: 300 chunks of a recorded voice get eager's answers, in Python, in C++ and after save and load."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import exportkit
from exportkit.cli import main
from exportkit.precision import with_tf32
from tests.artifacts import ROOT
from tests.examples import example_packages, speech_example
from tests.examples.speech_example import FOLDER, recording, sound
from tests.runtime import exportkit_run
from tests.subprocesses import run_python

COUNT = 300
HEARD = 137  # of them, before a session is saved
_CONTINUE = """
import sys, torch, exportkit
package, state, samples, device = sys.argv[1:]
torch.backends.cudnn.allow_tf32 = False
chunks = torch.frombuffer(bytearray(open(samples, "rb").read()), dtype=torch.float32).view(-1, 512)
with exportkit.load(package, device) as model, model.session(streams=1) as session:
    session.load_state(state)
    for chunk in chunks.to(device):
        print(session(chunk[None]).item().hex())
"""


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


def test_streams_of_one_session_do_not_hear_each_other(eager, chunks: Tensor, device: torch.device) -> None:
    """Three streams that begin at different places, in one session."""
    starts = (0, 40, 90)
    with exportkit.load(package(device.type), str(device)) as model, model.session(streams=3) as session:
        one = model.session(streams=1)
        together = [session(torch.stack([chunks[s + i] for s in starts]).to(device)) for i in range(60)]
        assert_close([each[0].item() for each in together], eager[:60])
        assert_close([each[2].item() for each in together], listened(one, chunks[90:150].to(device)))


@pytest.mark.process
def test_a_saved_session_goes_on_in_another_process(chunks: Tensor, device: torch.device, tmp_path: Path) -> None:
    state, samples = tmp_path / "state.safetensors", tmp_path / "samples.raw"
    samples.write_bytes(chunks[HEARD:].numpy().tobytes())
    with exportkit.load(package(device.type), str(device)) as model, model.session(streams=1) as session:
        listened(session, chunks[:HEARD].to(device))
        session.save(state)
        expected = [answer.hex() for answer in listened(session, chunks[HEARD:].to(device))]
    said = run_python(_CONTINUE, package(device.type), state, samples, device, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert said.split() == expected


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
    done = subprocess.run([listener, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.tensor([float(line) for line in done.stdout.split()], dtype=torch.float32).tolist()


@pytest.mark.process
def test_c_plus_plus_refuses_the_state_of_another_model(listener: Path, tmp_path: Path) -> None:
    state, samples = tmp_path / "state.safetensors", tmp_path / "none.raw"
    samples.write_bytes(b"")
    with exportkit.load(example_packages.made("llama")) as model, model.session(batch=1) as session:
        session.save(state)
    done = subprocess.run([listener, package(), samples, state], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.match(r"StateError: .*llama", done.stderr)


@pytest.mark.process
def test_it_is_verified_against_eager(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    model = example_packages.NAMED["speech"].model()
    assert main(["verify", str(package(device.type)), "--model", model, "--device", str(device)]) == 0
    assert "ok: " in capsys.readouterr().out.splitlines()[-1]
