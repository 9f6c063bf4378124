"""Listens to recordings, with a package in this process or with a server that has it."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import exportkit
from exportkit_speech import recording
from exportkit_speech.detector import SAMPLES
from exportkit_speech.speech_times import CHUNK, Change, SpeechTimes

DEADLINE = 10.0  # seconds for an answer of the server

Hear = Callable[[Tensor, bool], float]
"""Takes a chunk [512], and whether it is the last; returns how likely speech is in it."""


class Answer(NamedTuple):
    """What was heard in a chunk, which begins `at` seconds; and whether somebody speaks, and what has changed."""

    at: float
    likely: float
    speech: bool
    change: Change | None


@contextmanager
def here(package: Path) -> Iterator[Hear]:
    """A session of a package in this process."""
    with exportkit.load(package) as model, model.session(streams=1) as session:
        yield lambda chunk, last: session(chunk[None]).item()


@contextmanager
def there(url: str, model: str, api_key: str | None = None) -> Iterator[Hear]:
    """A sequence of requests to a server."""
    from exportkit.serve.client import Client

    with Client(url, deadline=DEADLINE, api_key=api_key) as client:
        sequence = client.sequence(model)

        def hear(chunk: Tensor, last: bool) -> float:
            (answer,) = sequence.infer({"chunk": chunk[None].numpy()}, end=last).values()
            return float(answer[0])

        yield hear


def listen(samples: Tensor, hear: Hear, *, real_time: bool = False) -> Iterator[Answer]:
    """Yields the answer for each chunk of a recording.

    Args:
        samples: The recording [count] at 16 kHz.
        hear: What hears a chunk.
        real_time: Whether a chunk is sent when its last sample would have been recorded, instead of at once.

    Raises:
        ExportkitError: The package or the server did not answer.
    """
    chunks = recording.chunks(samples, SAMPLES)
    times, start = SpeechTimes(), time.monotonic()
    for number, chunk in enumerate(chunks, 1):
        if real_time:
            time.sleep(max(0.0, start + number * CHUNK - time.monotonic()))
        at, likely = times.seconds, hear(chunk, number == len(chunks))
        change = times.add(likely)
        yield Answer(at, likely, times.speech, change)


def lines(answers: Iterable[Answer], *, each: bool = False) -> Iterator[str]:
    """Yields a line when somebody begins or ends to speak; with `each`, also one for each answer."""
    answer = None
    for answer in answers:
        if each:
            yield f"{answer.at:6.2f} s  {answer.likely:.2f} {'#' * round(40 * answer.likely)}".rstrip()
        if answer.change is not None:
            yield f"{answer.change.at:6.2f} s  speech {'begins' if answer.change.speech else 'ends'}"
    if answer is not None and answer.speech:
        yield f"{answer.at + CHUNK:6.2f} s  the recording ends in speech"
