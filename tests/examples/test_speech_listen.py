"""`exportkit-speech listen` says when somebody speaks in recordings, with a package or a server, or why it cannot."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.examples import example_packages
from tests.examples.speech_example import command, detector, eager, listen, recording, sound, speech_times
from tests.examples.test_speech_published import written
from tests.serve.page.in_thread import Site, served_packages
from tests.serve.page.sent_requests import Recorder

VOICE, NOISE = "Front_Center", "Noise"
LINE = re.compile(r" *(\d+\.\d\d) s  (.*)")


@pytest.fixture(scope="module")
def package() -> Path:
    return example_packages.made("speech")


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def site(package: Path, recorder: Recorder, starts_process: None) -> Iterator[Site]:
    with served_packages(package, around=recorder.around) as site:
        yield site


def heard(*arguments: object, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """What the command prints, on stderr where it fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["exportkit-speech", *map(str, arguments)])
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
    lines = heard("listen", *files, "--package", package, capsys=capsys).splitlines()
    assert lines.pop().endswith(" s  the recording ends in speech")
    assert [LINE.fullmatch(line).groups() for line in lines] == expected
    assert len(expected) >= 3
    noise = len(samples[0]) / recording.RATE, (len(samples[0]) + len(samples[1])) / recording.RATE
    assert not any(noise[0] + 0.3 < float(at) < noise[1] for at, _ in expected)


def test_a_server_says_the_same_and_its_sequence_ends(
    site: Site, package: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    local = heard("listen", sound(VOICE), "--each", "--package", package, capsys=capsys)
    served = heard("listen", sound(VOICE), "--each", "--url", site.url, capsys=capsys)
    assert served == local
    assert served.count("#") > 100
    steps = recorder.parameters
    assert len({step["sequence_id"] for step in steps}) == 1
    assert [step["sequence_start"] for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step["sequence_end"] for step in steps] == [False] * (len(steps) - 1) + [True]


def test_in_real_time_a_chunk_is_sent_when_it_would_have_been_recorded(site: Site, tmp_path: Path) -> None:
    file = written(tmp_path / "short.wav", np.zeros(10 * detector.SAMPLES, np.int16))
    with listen.there(site.url, "speech") as hear:
        sent: list[float] = []

        def noting(chunk, last) -> float:
            sent.append(time.monotonic())
            return hear(chunk, last)

        start = time.monotonic()
        assert list(listen.listen([file], noting, real_time=True)) == []
    assert len(sent) == 10
    assert all(at - start >= (number + 1) * 0.032 - 0.001 for number, at in enumerate(sent))


def test_a_recording_that_ends_in_speech_says_so(package: Path, tmp_path: Path) -> None:
    samples = (recording.read(sound(VOICE))[:8192] * 32767).numpy().astype(np.int16)
    with listen.here(package) as hear:
        *_, last = listen.listen([written(tmp_path / "cut.wav", samples)], hear)
    assert last == "  0.51 s  the recording ends in speech"


def test_nothing_is_heard_in_an_empty_recording(package: Path, tmp_path: Path) -> None:
    with listen.here(package) as hear:
        assert list(listen.listen([written(tmp_path / "none.wav", np.empty(0, np.int16))], hear)) == []


def test_what_cannot_be_heard_is_said_in_a_sentence(
    site: Site, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = written(tmp_path / "slow.wav", np.zeros(100, np.int16), rate=8000)
    for file, words in {slow: "at 8000 Hz; it must have", tmp_path / "missing.wav": "missing.wav"}.items():
        assert words in heard("listen", file, "--package", package, capsys=capsys, status=2)
    good = sound(VOICE)
    assert "no.pt2" in heard("listen", good, "--package", tmp_path / "no.pt2", capsys=capsys, status=2)
    other = heard("listen", good, "--url", site.url, "--model", "other", capsys=capsys, status=1)
    assert re.search("other", other)
    monkeypatch.setattr(listen, "_DEADLINE", 0.3)
    gone = heard("listen", good, "--url", "http://127.0.0.1:9", capsys=capsys, status=1)
    assert re.search(r"did not answer within 0\.3 s.*refused", gone)
