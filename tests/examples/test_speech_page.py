"""The page's part of examples/speech: in a browser whose microphone plays a recording, and where there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette

import exportkit
from exportkit.package import manifest as m
from exportkit.serve.page import page_parts as module
from exportkit.serve.page.page_parts import page_parts
from exportkit.serve.page.page_routes import page_routes
from exportkit.serve.serve_options import ServeOptions
from tests.examples import example_packages
from tests.examples.speech_example import page, recording, sound, speech_times
from tests.examples.test_speech_published import written
from tests.serve.page.conftest import chromium
from tests.serve.page.doubles import Model, Models
from tests.serve.page.in_thread import Site, served, served_packages
from tests.serve.page.sent_requests import Recorder
from tests.serve.page.visits import visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Response

LIGHT = '.light[data-state="{}"]'


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """The part is declared as its package's pyproject.toml does."""
    entry = EntryPoint("speech", "exportkit_speech.page", "exportkit.pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "declared", lambda group: {"speech": entry})
        page_parts.cache_clear()
        yield
    page_parts.cache_clear()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the microphone hears, at 48 kHz: a pause, a voice, a pause, machines, a pause, a voice and a long pause."""
    pieces = [sound(name).read_bytes()[44:] for name in ("Front_Center", "Noise", "Rear_Left")]
    pause = np.zeros(48_000, np.int16)
    samples = [pause]
    for piece in pieces:
        samples += [np.frombuffer(piece[: len(piece) // 2 * 2], np.int16), pause]
    return written(tmp_path_factory.mktemp("spoken") / "spoken.wav", np.concatenate([*samples, pause]), rate=48_000)


@pytest.fixture(scope="module")
def hearing(spoken: Path, starts_process: None) -> Iterator[Browser]:
    """A browser that is allowed a microphone, which plays the recording once."""
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    with chromium(*flags, f"--use-file-for-fake-audio-capture={spoken}%noloop") as browser:
        yield browser


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def site(recorder: Recorder, starts_process: None) -> Iterator[Site]:
    with served_packages(example_packages.made("speech"), around=recorder.around) as site:
        yield site


def test_the_light_goes_on_in_speech_and_the_answers_are_the_local_model_s(
    hearing: Browser, site: Site, recorder: Recorder
) -> None:
    answers: list[float] = []

    def note(response: Response) -> None:
        if response.url.endswith("/infer"):
            answers.append(float(np.frombuffer(response.body()[-4:], np.float32)[0]))

    with visit(hearing, site) as visited:
        visited.page.on("response", note)
        visited.page.get_by_role("button", name="Listen").click()
        visited.page.wait_for_selector(LIGHT.format("quiet"))
        for _ in range(2):
            visited.page.wait_for_selector(LIGHT.format("speech"))
            assert visited.text(".light") == "Somebody speaks"
            visited.page.wait_for_selector(LIGHT.format("quiet"))
        visited.page.get_by_role("button", name="Stop").click()
        visited.page.wait_for_selector(LIGHT.format("off"))
        changes = visited.text(".changes").splitlines()
    steps = recorder.parameters
    assert {step["sequence_id"] for step in steps} == {steps[0]["sequence_id"]}
    assert [step["sequence_start"] for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step["sequence_end"] for step in steps] == [False] * (len(steps) - 1) + [True]
    captured = torch.cat([sent["chunk"] for sent in recorder.sent])
    assert not captured[-1].any()
    with exportkit.load(example_packages.made("speech")) as model, model.session(streams=1) as session:
        expected = [session(chunk[None]).item() for chunk in captured]
    assert answers == expected
    assert changes == said_of(expected[:-1])
    assert [line.split()[-1] for line in changes[:4]] == ["begins", "ends", "begins", "ends"]


def said_of(answers: list[float]) -> list[str]:
    times = speech_times.SpeechTimes()
    changes = [change for answer in answers if (change := times.add(answer))]
    return [f"{change.at:.2f} s  speech {'begins' if change.speech else 'ends'}" for change in changes]


def test_what_was_captured_is_the_recording(recorder: Recorder, spoken: Path) -> None:
    """Of the test before: at 16 kHz, not processed as a phone would, without a gap."""
    if not recorder.sent:
        pytest.skip("the test before has captured nothing")
    captured = torch.cat([sent["chunk"] for sent in recorder.sent]).flatten().double().numpy()
    played = recording.read(spoken).double().numpy()
    size = 1 << 19
    spectrum = np.fft.rfft(captured, size) * np.fft.rfft(played, size).conj()
    shift = int(np.fft.irfft(spectrum, size).argmax())
    shift -= size if shift > size // 2 else 0
    first, last = max(0, shift), min(len(captured), len(played) + shift)
    heard, given = captured[first:last], played[first - shift : last - shift]
    likeness = float(heard @ given / np.sqrt((heard @ heard) * (given @ given)))
    assert likeness > 0.98
