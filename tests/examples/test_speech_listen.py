"""`exportkit-speech listen` says when somebody speaks in recordings, with a package or a server, or why it cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from exportkit.cli.app import COMMANDS
from tests.artifacts import ROOT
from tests.examples import example_packages
from tests.examples.speech_example import FOLDER, command, detector, eager, listen, recording, sound, speech_times
from tests.examples.test_speech_published import written
from tests.serve.page.in_thread import Site, served_packages
from tests.serve.page.sent_requests import Recorder
from tests.subprocesses import output_of

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


def test_in_real_time_a_chunk_is_sent_when_it_would_have_been_recorded(site: Site) -> None:
    with listen.there(site.url, "speech") as hear:
        sent: list[float] = []

        def noting(chunk, last) -> float:
            sent.append(time.monotonic())
            return hear(chunk, last)

        start = time.monotonic()
        answers = list(listen.listen(torch.zeros(10 * detector.SAMPLES), noting, real_time=True))
    assert [answer.at for answer in answers] == pytest.approx([number * 0.032 for number in range(10)])
    assert all(at - start >= (number + 1) * 0.032 - 0.001 for number, at in enumerate(sent))


def test_nothing_is_heard_in_an_empty_recording(package: Path) -> None:
    with listen.here(package) as hear:
        assert list(listen.lines(listen.listen(torch.empty(0), hear))) == []


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
    monkeypatch.setattr(listen, "DEADLINE", 0.3)
    gone = heard("listen", good, "--url", "http://127.0.0.1:9", capsys=capsys, status=1)
    assert re.search("did not answer: .*refused", gone)


def test_the_picture_has_the_answers_and_when_somebody_spoke(package: Path, tmp_path: Path, capsys) -> None:
    """docs/speech.svg is this picture, but for last digits of another machine."""
    drawn = tmp_path / "speech.svg"
    files = [sound(VOICE), sound(NOISE), sound("Rear_Left")]
    lines = heard("listen", *files, "--each", "--package", package, "--picture", drawn, capsys=capsys).splitlines()
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


# --- the commands of README.md ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Path:
    """Where pip has put the example, by README.md's first command."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(FOLDER, folder / "speech", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    output_of(*pip, "--target", folder / "site", source)
    return folder / "site"


def ran(installed: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The installed command, in a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    command = [str(installed / "bin" / "exportkit-speech"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


@pytest.mark.process
def test_two_commands_serve_the_page_that_listens(installed: Path, package: Path, tmp_path: Path) -> None:
    """With the package that the second one would make first; the test below holds it to what it makes."""
    shutil.copy(package, tmp_path / "speech.pt2")
    server = ran(installed, tmp_path, "serve", "--port", "0", "--no-grpc", "--no-access-log", "--json")
    try:
        listening = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")
        site = Site(int(listening["http"].rpartition(":")[2]))
        (model,) = site.get("/page/status").json()["models"]
        assert model["part"] == {"name": "speech", "facts": {"input": "chunk", "samples": 512}}
        for file in (FOLDER / "exportkit_speech" / "page" / "static").iterdir():
            assert site.get(f"/page/parts/speech/{file.name}").body == file.read_bytes()
        client = ran(installed, tmp_path, "listen", "--url", site.url, str(sound(VOICE)))
        said, _ = client.communicate(timeout=120)
        assert said in (FOLDER / "README.md").read_text()
        assert said.count("begins") == 2
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors
    assert errors.startswith("$ exportkit serve speech.pt2 --port 0 --no-grpc --no-access-log --json\n")


def test_the_package_is_made_once_and_a_failure_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def run(arguments: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(arguments[3:]))
        return subprocess.CompletedProcess(arguments, 7 if "package" in arguments else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "execv", lambda path, arguments: ran.append("became " + " ".join(arguments[3:])))
    assert command.serve([]) == 7
    assert ran == ["export speech -o speech_aoti.pt2", "package speech_aoti.pt2 -o speech.pt2"]
    ran.clear()
    Path("speech.pt2").touch()
    command.serve(["--port", "0"])
    assert ran == ["became serve speech.pt2 --port 0"]
    for line in (*command.MAKE, "serve speech.pt2"):
        app, _, rest = line.partition(" ")
        assert app in COMMANDS
        assert rest
