"""examples/speech: the published answers in Python, in C++ and from a server; and `exportkit-speech listen`."""

from __future__ import annotations

import math
import random
import re
import time
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor

import exportkit
from exportkit.precision import with_tf32
from tests.artifacts import ROOT
from tests.examples import example_packages, speech_example
from tests.examples.speech_example import FOLDER, command, detector, eager, listen, recording, sound, speech_times
from tests.runtime import exportkit_run
from tests.serve.page.in_thread import Site, served_packages
from tests.serve.page.sent_requests import Recorder
from tests.subprocesses import output_of

COUNT = 300
HEARD = 137  # of them, before a session is saved
VOICE, NOISE = "Front_Center", "Noise"
LINE = re.compile(r" *(\d+\.\d\d) s  (.*)")
TOLERANCE = 1e-5  # of a probability


@pytest.fixture(scope="module")
def chunks() -> Tensor:
    """[300, 512] of a voice at 16 kHz."""
    return speech_example.repeated(recording.read(sound(VOICE)), COUNT)


@pytest.fixture(scope="module")
def answers_of_eager(chunks: Tensor) -> list[float]:
    """What the module itself answers."""
    example_packages.require_weights()
    return eager(chunks)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """On a GPU, torch would round what convolutions multiply to TF32."""
    with with_tf32(allowed=False):
        yield


@pytest.fixture(scope="module")
def package() -> Path:
    return example_packages.made("speech")


def listened(session: exportkit.Session, chunks: Tensor) -> list[float]:
    return [session(chunk[None]).item() for chunk in chunks]


def assert_close(actual: Sequence[float], expected: Sequence[float]) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_session_gives_eager_s_answers(answers_of_eager, chunks: Tensor, device: torch.device) -> None:
    made = example_packages.made("speech", device.type)
    with exportkit.load(made, str(device)) as model, model.session(streams=1) as session:
        answers = listened(session, chunks.to(device))
        assert_close(answers, answers_of_eager)
        session.reset()
        assert listened(session, chunks[:20].to(device)) == answers[:20]


def test_c_plus_plus_gives_the_same_answers(answers_of_eager, chunks: Tensor, package: Path, tmp_path: Path) -> None:
    """To the last bit those of Python, from the beginning and from a state that Python has saved."""
    listener = exportkit_run.build_example(FOLDER, tmp_path / "built") / "listen"
    samples, rest, state = tmp_path / "all.raw", tmp_path / "rest.raw", tmp_path / "state.safetensors"
    samples.write_bytes(chunks.numpy().tobytes())
    rest.write_bytes(chunks[HEARD:].numpy().tobytes())
    with exportkit.load(package) as model, model.session(streams=1) as session:
        answers = listened(session, chunks[:HEARD])
        session.save(state)
        answers += listened(session, chunks[HEARD:])
    for arguments, expected in (((package, samples), answers), ((package, rest, state), answers[HEARD:])):
        said = [float(line) for line in output_of(listener, *arguments).split()]
        assert torch.tensor(said, dtype=torch.float32).tolist() == expected
    assert_close(answers, answers_of_eager)


# --- the publisher ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def publisher() -> Any:
    """Silero's own class, which runs silero_vad.onnx with ONNX Runtime."""
    example_packages.require_weights()
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install onnxruntime")
    return pytest.importorskip("silero_vad").load_silero_vad(onnx=True)


def sounds() -> dict[str, Tensor]:
    """Voices one after another, and what is no voice."""
    voice = torch.cat([recording.read(path) for path in speech_example.voices()])
    made = torch.Generator().manual_seed(0)
    noise = torch.randn(32_000, generator=made)
    return {
        "voice": voice,
        "faint voice": voice / 50,
        "voice in noise": voice + torch.randn(len(voice), generator=made) / 10,
        "machine": recording.read(sound(NOISE)),
        "noise": noise / 20,
        "loud noise": noise.sign(),
        "silence": torch.zeros(32_000),
    }


def test_it_answers_as_the_publisher_s_onnx_file_in_onnx_runtime(publisher: Any) -> None:
    """Chunk by chunk, with the state that each keeps: of a voice, and of what is none."""
    heard = {}
    for name, samples in sounds().items():
        chunks = recording.chunks(samples, detector.SAMPLES)
        ours, exact = np.array(eager(chunks)), np.array(eager(chunks.double()))
        publisher.reset_states()
        expected = np.array([publisher(chunk[None], recording.RATE).item() for chunk in chunks])
        error, their_error = abs(ours - exact).max(), abs(expected - exact).max()
        assert their_error < TOLERANCE, name  # in float64 the module is what the file computes
        # The state carries rounding on, which differs with the CPU: for a faint voice ours is 2.7 times theirs on one.
        assert error < 4 * their_error + 1e-6, name
        heard[name] = float((expected > 0.5).mean())
    assert heard["voice"] > 0.5
    assert heard["voice in noise"] > 0.5
    assert max(heard["machine"], heard["noise"], heard["loud noise"], heard["silence"]) == 0


class Said:
    """In place of a model: answers what it was given."""

    def __init__(self, answers: list[float]) -> None:
        self.answers = iter(answers)

    def reset_states(self) -> None:
        pass

    def __call__(self, chunk: Tensor, rate: int) -> Tensor:
        return torch.tensor(next(self.answers))


@pytest.mark.parametrize("seed", range(4))
def test_speech_begins_and_ends_when_the_publisher_says_so(seed: int) -> None:
    """Of answers that wander over the thresholds. The first chunk may be speech."""
    chance = random.Random(seed)
    level, answers = chance.random(), [0.9]
    for _ in range(4000):
        level = min(1.0, max(0.0, level + chance.gauss(0, 0.12)))
        answers.append(level)
    iterator = pytest.importorskip("silero_vad").VADIterator(Said(answers))
    found = [iterator(torch.zeros(512)) for _ in answers]
    expected = [(kind == "start", at / recording.RATE) for each in found if each for kind, at in each.items()]
    times = speech_times.SpeechTimes()
    ours = [change for answer in answers if (change := times.add(answer))]
    assert [change.speech for change in ours] == [begins for begins, _ in expected]
    assert [change.at for change in ours] == pytest.approx([at for _, at in expected], abs=1e-4)
    assert len(ours) > 50


# --- listen -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def site(package: Path, recorder: Recorder) -> Iterator[Site]:
    with served_packages(package, around=recorder.around) as site:
        yield site


def heard(*arguments: object, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """What `exportkit-speech listen` prints, on stderr where it fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["exportkit-speech", "listen", *map(str, arguments)])
        assert command.main() == status
    said = capsys.readouterr()
    return said.err if status else said.out


def test_it_says_when_somebody_begins_and_ends_to_speak(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Voice, noise and voice, one after another: as the answers of the module itself say."""
    files = [sound(VOICE), sound(NOISE), sound("Rear_Left")]
    times, expected = speech_times.SpeechTimes(), []
    samples = [recording.read(file) for file in files]
    for answer in eager(recording.chunks(torch.cat(samples), detector.SAMPLES)):
        if change := times.add(answer):
            expected.append((f"{change.at:.2f}", f"speech {'begins' if change.speech else 'ends'}"))
    lines = heard(*files, "--package", package, capsys=capsys).splitlines()
    assert lines.pop().endswith(" s  the recording ends in speech")
    assert [LINE.fullmatch(line).groups() for line in lines] == expected
    assert len(expected) >= 3
    noise = len(samples[0]) / recording.RATE, (len(samples[0]) + len(samples[1])) / recording.RATE
    assert not any(noise[0] + 0.3 < float(at) < noise[1] for at, _ in expected)
    assert heard(files[0], "--package", package, capsys=capsys) in (FOLDER / "README.md").read_text()


def test_a_server_says_the_same_and_its_sequence_ends(
    site: Site, package: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    local = heard(sound(VOICE), "--each", "--package", package, capsys=capsys)
    assert heard(sound(VOICE), "--each", "--url", site.url, capsys=capsys) == local
    assert local.count("#") > 100
    steps = recorder.parameters
    assert len({step["sequence_id"] for step in steps}) == 1
    assert [step["sequence_start"] for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step["sequence_end"] for step in steps] == [False] * (len(steps) - 1) + [True]


def test_in_real_time_a_chunk_is_heard_when_it_would_have_been_recorded() -> None:
    heard: list[float] = []

    def hear(chunk: Tensor, last: bool) -> float:
        heard.append(time.monotonic())
        return 0.0

    start = time.monotonic()
    answers = list(listen.listen(torch.zeros(10 * detector.SAMPLES), hear, real_time=True))
    assert [answer.at for answer in answers] == pytest.approx([number * 0.032 for number in range(10)])
    assert all(at - start >= (number + 1) * 0.032 - 0.001 for number, at in enumerate(heard))


def test_what_cannot_be_heard_is_said_in_a_sentence(
    site: Site, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silence, good = np.zeros(99, np.int16), sound(VOICE)
    slow, deep = written(tmp_path / "slow.wav", silence, rate=8000), written(tmp_path / "deep.wav", silence, width=3)
    text = tmp_path / "text.wav"
    text.write_bytes(b"not a recording")
    refused = {
        (slow, package): "slow.wav has 16 bits at 8000 Hz; it must have 16 bits at 16000 Hz or more",
        (deep, package): "deep.wav has 24 bits",
        (text, package): "text.wav is no WAV file",
        (tmp_path / "missing.wav", package): "missing.wav",
        (good, tmp_path / "no.pt2"): "no.pt2",
    }
    for (file, asked), words in refused.items():
        assert words in heard(file, "--package", asked, capsys=capsys, status=2)
    assert "other" in heard(good, "--url", site.url, "--model", "other", capsys=capsys, status=1)
    monkeypatch.setattr(listen, "DEADLINE", 0.3)
    gone = heard(good, "--url", "http://127.0.0.1:9", capsys=capsys, status=1)
    assert re.search("did not answer: .*refused", gone)


def test_the_picture_has_the_answers_and_when_somebody_spoke(package: Path, tmp_path: Path, capsys) -> None:
    """docs/speech.svg is this picture, but for last digits of another machine."""
    drawn = tmp_path / "speech.svg"
    files = [sound(VOICE), sound(NOISE), sound("Rear_Left")]
    lines = heard(*files, "--each", "--package", package, "--picture", drawn, capsys=capsys).splitlines()
    root, documented = (ElementTree.parse(path).getroot() for path in (drawn, ROOT / "docs" / "speech.svg"))
    assert [file.name for file in files] == [text.text for text in root.iterfind("{*}text[@class='name']")]
    assert len(root.findall("{*}path[@class='spoken']")) == sum(line.endswith("begins") for line in lines)
    points = numbers(root.find("{*}path[@class='likely']"))
    assert len(points) == 2 * sum(not line.endswith(("begins", "ends", "speech")) for line in lines)
    for ours, theirs in zip(root.iterfind("{*}path"), documented.iterfind("{*}path"), strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), abs=0.2)


def numbers(path: ElementTree.Element | None) -> list[float]:
    assert path is not None
    return [float(number) for number in re.findall(r"[\d.]+", path.attrib["d"])]


# --- recordings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [22_050, 48_000])
def test_tones_below_7_khz_pass_and_those_above_8_5_khz_do_not(rate: int) -> None:
    at = torch.arange(rate // 5, dtype=torch.float64) / rate
    expected_at = torch.arange(3200, dtype=torch.float64) / 16_000
    for hertz in (100, 1000, 3999, 6900):
        found = recording.resampled(torch.sin(2 * math.pi * hertz * at), rate)
        expected = torch.sin(2 * math.pi * hertz * expected_at)
        assert len(found) == 3200
        assert (found - expected)[100:-100].abs().max() < 0.01, hertz
    for hertz in (8500, 10_000):
        assert recording.resampled(torch.sin(2 * math.pi * hertz * at), rate)[100:-100].abs().max() < 0.01, hertz


def written(path: Path, samples: np.ndarray, rate: int = 16_000, width: int = 2) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


def test_a_recording_at_16_khz_is_read_as_it_is_and_two_channels_are_averaged(tmp_path: Path) -> None:
    left = np.arange(-1000, 1000, dtype=np.int16)
    mono = recording.read(written(tmp_path / "mono.wav", left))
    assert torch.equal(mono, torch.from_numpy(left / np.float32(32768)))
    assert torch.equal(recording.read(written(tmp_path / "both.wav", np.stack([left, 3 * left], 1))), 2 * mono)
    chunks = recording.chunks(mono, 512)
    assert chunks.shape == (4, 512)
    assert not chunks.flatten()[2000:].any()  # silence fills the last one
