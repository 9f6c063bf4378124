"""Listens to recordings, with a package in this process or with a server that has it."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import exportkit
from exportkit.errors import ModelRunError
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
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    scheme, _, address = url.rstrip("/").partition("://")
    sequence, begins = secrets.token_hex(16), True
    headers = {"x-session-id": sequence, **({} if api_key is None else {"Authorization": f"Bearer {api_key}"})}
    with triton.InferenceServerClient(address, ssl=scheme == "https", network_timeout=DEADLINE) as client:

        def hear(chunk: Tensor, last: bool) -> float:
            nonlocal begins
            given = triton.InferInput("chunk", [1, len(chunk)], "FP32")
            given.set_data_from_numpy(chunk[None].numpy())
            which = {"sequence_id": sequence, "sequence_start": begins, "sequence_end": last}
            try:
                answer = client.infer(model, [given], headers=headers, **which)
            except (InferenceServerException, OSError) as error:
                raise ModelRunError(f"{url} did not answer: {error}") from error
            begins = False
            (output,) = answer.get_response()["outputs"]
            return float(answer.as_numpy(output["name"])[0])

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
