"""Listens to recordings, with a package in this process or with a server that has it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import exportkit
from exportkit_speech import recording
from exportkit_speech.detector import SAMPLES
from exportkit_speech.speech_times import CHUNK, SpeechTimes

_DEADLINE = 10.0  # seconds for an answer of the server

Hear = Callable[[Tensor, bool], float]
"""Takes a chunk [512], and whether it is the last; returns how likely speech is in it."""


@contextmanager
def here(package: Path) -> Iterator[Hear]:
    """A session of a package in this process."""
    with exportkit.load(package) as model, model.session(streams=1) as session:
        yield lambda chunk, last: session(chunk[None]).item()


@contextmanager
def there(url: str, model: str, api_key: str | None = None) -> Iterator[Hear]:
    """A sequence of requests to a server."""
    from exportkit.serve.client import Client

    with Client(url, deadline=_DEADLINE, api_key=api_key) as client:
        sequence = client.sequence(model)

        def hear(chunk: Tensor, last: bool) -> float:
            (answer,) = sequence.infer({"chunk": chunk[None].numpy()}, end=last).values()
            return float(answer[0])

        yield hear


def listen(files: Sequence[Path], hear: Hear, *, real_time: bool = False, each: bool = False) -> Iterator[str]:
    """Yields a line when somebody begins or ends to speak in recordings that follow one another.

    Args:
        files: The recordings, as WAV files.
        hear: What hears a chunk.
        real_time: Whether a chunk is sent when its last sample would have been recorded, instead of at once.
        each: Whether each answer is a line, too.

    Raises:
        ValueError: A file is no recording that can be read.
        OSError: Likewise.
        ExportkitError: The package or the server did not answer.
    """
    chunks = recording.chunks(torch.cat([recording.read(file) for file in files]), SAMPLES)
    times, start = SpeechTimes(), time.monotonic()
    for number, chunk in enumerate(chunks, 1):
        if real_time:
            time.sleep(max(0.0, start + number * CHUNK - time.monotonic()))
        began = times.seconds
        likely = hear(chunk, number == len(chunks))
        change = times.add(likely)
        if each:
            yield f"{began:6.2f} s  {likely:.2f} {'#' * round(40 * likely)}".rstrip()
        if change is not None:
            yield f"{change.at:6.2f} s  speech {'begins' if change.speech else 'ends'}"
    if times.speech:
        yield f"{times.seconds:6.2f} s  the recording ends in speech"
