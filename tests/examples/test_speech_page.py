"""The page's part of examples/speech: in a browser whose microphone plays a recording, and where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import tritonclient.http as triton

import exportkit
from exportkit.package import manifest as m
from exportkit.serve.page import page_routes as module
from exportkit.serve.page.page_routes import page_parts
from tests.contrast import CONTRASTS
from tests.examples import example_packages
from tests.examples.speech_example import page, recording, sound, speech_times
from tests.examples.test_speech_published import written
from tests.serve.page.in_thread import Site, served_packages
from tests.serve.page.sent_requests import Recorder
from tests.serve.page.visits import Visit, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Response, Route

    Launch = Callable[..., Browser]

LIGHT = '.light[data-state="{}"]'
FAKE_DEVICE = "--use-fake-device-for-media-stream"
NOTE_LIGHTS = """() => {
  window.lights = [];
  const light = document.querySelector(".light");
  new MutationObserver(() => {
    if (lights.at(-1) !== light.dataset.state) lights.push(light.dataset.state);
  }).observe(light, { attributes: true, attributeFilter: ["data-state"] });
}"""


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
    pause = np.zeros(48_000, np.int16)
    samples = [pause]
    for name in ("Front_Center", "Noise", "Rear_Left"):
        samples += [np.frombuffer(sound(name).read_bytes()[44:], np.int16), pause]
    return written(tmp_path_factory.mktemp("spoken") / "spoken.wav", np.concatenate([*samples, pause]), rate=48_000)


@pytest.fixture(scope="module")
def hearing(spoken: Path, launch: Launch) -> Iterator[Browser]:
    """A browser that is allowed a microphone, which plays the recording again and again."""
    flags = (FAKE_DEVICE, "--use-fake-ui-for-media-stream", f"--use-file-for-fake-audio-capture={spoken}")
    with closing(launch(*flags)) as browser:
        yield browser


@pytest.fixture(scope="module")
def deaf(browser: Browser) -> Browser:
    """A browser on a machine without a microphone."""
    return browser


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def site(recorder: Recorder, starts_process: None) -> Iterator[Site]:
    with served_packages(example_packages.made("speech"), around=recorder.around) as site:
        yield site


def press(visited: Visit, name: str) -> None:
    visited.page.get_by_role("button", name=name, exact=True).click()


def listening(visited: Visit) -> None:
    """Starts, and waits for the first answer."""
    press(visited, "Listen")
    visited.page.wait_for_selector(".listener .said:has-text('answered in')")


def problem(visited: Visit) -> str:
    """What is said when it has stopped by itself."""
    visited.page.wait_for_selector(".listener .problem:not(:empty)")
    assert visited.text(".light") == "Not listening"
    assert visited.text(".listener button") == "Listen"
    return visited.text(".listener .problem")


def wait_until(true: Callable[[], bool], visited: Visit) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        visited.page.wait_for_timeout(20)


def assert_one_sequence(steps: list[dict[str, Any]]) -> None:
    assert len({step["sequence_id"] for step in steps}) == 1
    assert [step["sequence_start"] for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step["sequence_end"] for step in steps] == [False] * (len(steps) - 1) + [True]


def said_of(answers: list[float]) -> list[str]:
    times = speech_times.SpeechTimes()
    changes = [change for answer in answers if (change := times.add(answer))]
    return [f"{change.at:.2f} s  speech {'begins' if change.speech else 'ends'}" for change in changes]


def test_the_light_goes_on_in_speech_and_the_answers_are_the_local_model_s(
    hearing: Browser, site: Site, recorder: Recorder, spoken: Path
) -> None:
    """To the last bit, for what was captured: the recording, at 16 kHz and not processed as a phone would."""
    answers: list[float] = []

    def note(response: Response) -> None:
        if response.url.endswith("/infer"):
            answers.append(float(np.frombuffer(response.body()[-4:], np.float32)[0]))

    with visit(hearing, site) as visited:
        visited.page.on("response", note)
        visited.page.wait_for_selector(LIGHT.format("off"))
        visited.evaluate(NOTE_LIGHTS)
        press(visited, "Listen")
        wait_until(lambda: visited.page.locator(".changes li").count() >= 4, visited)
        press(visited, "Stop")
        visited.page.wait_for_selector(LIGHT.format("off"))
        lights = visited.evaluate("lights")
        changes = visited.text(".changes").splitlines()
    assert_one_sequence(recorder.parameters)
    captured = torch.cat([sent["chunk"] for sent in recorder.sent])
    assert not captured[-1].any()  # ends the sequence
    with exportkit.load(example_packages.made("speech")) as model, model.session(streams=1) as session:
        expected = [session(chunk[None]).item() for chunk in captured]
    assert answers == expected
    assert changes == said_of(expected[:-1])
    assert [line.split()[-1] for line in changes[:4]] == ["begins", "ends", "begins", "ends"]
    assert lights[:5] == ["quiet", "speech", "quiet", "speech", "quiet"]
    assert_resembles(captured.flatten().numpy(), spoken)


def assert_resembles(captured: np.ndarray, spoken: Path) -> None:
    """The first two seconds of a recording were captured, sooner or later."""
    samples = np.frombuffer(spoken.read_bytes()[44 : 44 + 2 * 2 * 48_000], np.int16) / 32_768
    played = recording.resampled(torch.from_numpy(samples), 48_000).numpy()
    size = 1 << 18
    matches = np.fft.irfft(np.fft.rfft(captured, size) * np.fft.rfft(played, size).conj(), size)
    shift = int(matches.argmax())
    shift -= size if shift > size // 2 else 0
    first, last = max(0, shift), min(len(captured), len(played) + shift)
    heard, given = captured[first:last], played[first - shift : last - shift]
    assert heard @ given > 0.98 * np.sqrt((heard @ heard) * (given @ given))


def test_a_part_that_is_no_longer_shown_ends_its_sequence(hearing: Browser, site: Site, recorder: Recorder) -> None:
    """Another model is shown: nobody would see that the microphone is open."""
    with visit(hearing, site) as visited:
        recorder.parameters.clear()
        listening(visited)
        visited.evaluate("document.querySelector('.listener').remove()")
        wait_until(lambda: recorder.parameters[-1]["sequence_end"], visited)
        count = len(recorder.parameters)
        visited.page.wait_for_timeout(200)
    assert len(recorder.parameters) == count
    assert_one_sequence(recorder.parameters)


def test_a_lost_sequence_is_said_and_the_next_start_is_another(
    hearing: Browser, site: Site, recorder: Recorder
) -> None:
    with visit(hearing, site) as visited:
        visited.expected = ("Failed to load resource: the server responded with a status of 409",)
        listening(visited)
        lost = recorder.parameters[-1]["sequence_id"]
        take_over(site, lost)
        said = problem(visited)
        assert said.startswith("The server has lost the sequence: ")
        assert said.endswith("Start again; what was heard before is forgotten.")
        listening(visited)
        assert visited.text(".listener .problem") == ""
        assert recorder.parameters[-1]["sequence_id"] != lost
        press(visited, "Stop")
        visited.page.wait_for_selector(LIGHT.format("off"))


def take_over(site: Site, sequence_id: str) -> None:
    """Somebody begins another sequence of the same id, and ends it."""
    given = triton.InferInput("chunk", [1, 512], "FP32")
    given.set_data_from_numpy(np.zeros((1, 512), np.float32))
    with triton.InferenceServerClient(site.url.removeprefix("http://")) as client:
        client.infer("speech", [given], sequence_id=sequence_id, sequence_start=True, sequence_end=True)


def test_a_server_that_is_gone_is_said(hearing: Browser, site: Site, recorder: Recorder) -> None:
    with visit(hearing, site) as visited:
        visited.expected = ("Failed to load resource: net::ERR_CONNECTION_REFUSED",)
        listening(visited)
        visited.page.route("**/infer", lambda route: route.abort("connectionrefused"))
        assert problem(visited).startswith("The server does not answer: it has ended, or the network is down.")
    take_over(site, recorder.parameters[-1]["sequence_id"])  # or the server waits for it at its end


def test_a_refusal_is_said_in_the_server_s_words(hearing: Browser, site: Site) -> None:
    def refuse(route: Route) -> None:
        route.fulfill(status=429, json={"error": "there are 9 sequences, and at most 9 may be"})

    with visit(hearing, site) as visited:
        visited.expected = ("Failed to load resource: the server responded with a status of 429",)
        visited.page.route("**/infer", refuse)
        press(visited, "Listen")
        assert "The server refuses: there are 9 sequences, and at most 9 may be." in problem(visited)


def test_a_server_that_is_too_slow_is_said_and_nothing_piles_up(hearing: Browser, site: Site) -> None:
    waiting: list[Route] = []
    with visit(hearing, site) as visited:
        visited.page.route("**/infer", lambda route: waiting.append(route))
        press(visited, "Listen")
        visited.page.wait_for_selector(".listener .problem:not(:empty)")
        assert "more slowly than one speaks: 4 seconds wait" in visited.text(".listener .problem")
        assert len(waiting) == 1
        waiting.pop().continue_()
        wait_until(lambda: bool(waiting), visited)  # the step that ends the sequence
        waiting.pop().continue_()
        visited.page.wait_for_selector(LIGHT.format("off"))


def test_without_a_microphone_it_says_so(deaf: Browser, site: Site) -> None:
    with visit(deaf, site) as visited:
        press(visited, "Listen")
        assert problem(visited) == "There is no microphone. Connect one, and start again."


def test_what_the_browser_forbids_is_said(launch: Launch, site: Site) -> None:
    with closing(launch(FAKE_DEVICE, "--deny-permission-prompts")) as browser, visit(browser, site) as visited:
        press(visited, "Listen")
        assert problem(visited).startswith("The microphone is not allowed. Allow it for this page")


OPENED = "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', '%s') }"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (OPENED % "NotReadableError", "The microphone cannot be read: another program may use it."),
        (OPENED % "OverconstrainedError", "The microphone cannot be opened: no."),
        ("Object.defineProperty(navigator, 'mediaDevices', {value: undefined})", "only to pages that come over HTTPS"),
        ("AudioContext = class { sampleRate = 8000; close() {} }", "The audio of this browser has 8000 Hz, less than"),
    ],
    ids=["in use", "unknown", "no HTTPS", "8 kHz"],
)
def test_every_other_reason_is_a_sentence(hearing: Browser, site: Site, script: str, words: str) -> None:
    with visit(hearing, site) as visited:
        visited.evaluate(f"() => {{ {script} }}")
        press(visited, "Listen")
        assert words in problem(visited)


# A microphone that is opened when `allow` is called, and seen as `opened`.
KEPT = """() => {
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    const allowed = new Promise((resolve) => { window.allow = resolve; });
    navigator.mediaDevices.getUserMedia = async (wanted) => {
        await allowed;
        return (window.opened = await ask(wanted));
    };
}"""
STATES = "() => window.opened?.getTracks().map((track) => track.readyState)"


def test_a_microphone_that_is_pulled_out_is_said(hearing: Browser, site: Site, recorder: Recorder) -> None:
    with visit(hearing, site) as visited:
        visited.evaluate(f"() => {{ ({KEPT})(); allow(); }}")
        listening(visited)
        visited.evaluate("() => opened.getTracks()[0].dispatchEvent(new Event('ended'))")
        visited.page.wait_for_selector(LIGHT.format("off"))
        assert problem(visited) == "The microphone is gone. Connect it, and start again."
        assert visited.evaluate(STATES) == ["ended"]
        assert recorder.parameters[-1]["sequence_end"]


def test_a_microphone_that_is_allowed_after_stop_is_closed(hearing: Browser, site: Site, recorder: Recorder) -> None:
    with visit(hearing, site) as visited:
        recorder.parameters.clear()
        visited.evaluate(KEPT)
        press(visited, "Listen")
        press(visited, "Stop")
        assert visited.text(".light") == "Not listening"
        visited.evaluate("() => allow()")
        wait_until(lambda: visited.evaluate(STATES) == ["ended"], visited)
        assert recorder.parameters == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_text_has_contrast_in_both_themes(deaf: Browser, site: Site, scheme: str) -> None:
    with visit(deaf, site, color_scheme=scheme, reduced_motion="reduce") as visited:
        press(visited, "Listen")
        problem(visited)
        visited.page.mouse.move(0, 0)  # a button under it has another colour
        for state in ("off", "quiet", "speech"):
            visited.evaluate("state => document.querySelector('.light').dataset.state = state", state)
            assert visited.evaluate(CONTRASTS) == []


def test_only_models_that_hear_chunks_are_recognised() -> None:
    with exportkit.load(example_packages.made("speech")) as model:
        call = model.manifest.call
    (given,), (answer,) = call.inputs, call.outputs
    change = msgspec.structs.replace
    assert page.recognise(call) == {"input": "chunk", "samples": 512}
    one = change(call, inputs=(change(given, shape=(1, 512)),), outputs=(change(answer, shape=(1,)),))
    assert page.recognise(one) == {"input": "chunk", "samples": 512}
    different: list[dict[str, Any]] = [{"name": "x"}, {"dtype": "float16"}, {"shape": (4, 512)}, {"shape": (512,)}]
    others: list[m.Call] = [
        change(call, inputs=(given, given)),
        change(call, outputs=(answer, answer)),
        change(call, dimensions=tuple(change(each, min=2) for each in call.dimensions)),
        change(call, outputs=(change(answer, dtype="int64"),)),
        change(call, outputs=(change(answer, shape=(*answer.shape, 2)),)),
        *(change(call, inputs=(change(given, **keys),)) for keys in different),
    ]
    assert [page.recognise(each) for each in others] == [None] * len(others)
