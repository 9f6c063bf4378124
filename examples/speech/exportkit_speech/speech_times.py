"""When somebody speaks, from how likely it is: the rule of silero-vad's VADIterator, with its numbers."""

from typing import NamedTuple

CHUNK = 0.032  # seconds that an answer is about
BEGINS, ENDS = 0.5, 0.35  # speech begins with an answer of at least BEGINS, and can end with one below ENDS
SILENCE = 0.1  # seconds after which it has ended, if no answer of BEGINS or more came
MARGIN = 0.03  # seconds that are speech before the first such answer, and after the last


class Change(NamedTuple):
    """Somebody begins or ends to speak, `at` seconds."""

    at: float
    speech: bool


class SpeechTimes:
    """Follows the answers of one stream.

    Attributes:
        speech: Whether somebody speaks. It stays so until the silence has been long enough.
    """

    def __init__(self) -> None:
        self.speech = False
        self._heard = 0  # chunks
        self._quiet: int | None = None  # how many were heard before the first that may have ended speech

    @property
    def seconds(self) -> float:
        """How much was heard."""
        return self._heard * CHUNK

    def add(self, likely: float) -> Change | None:
        """Takes the next answer. Returns what has changed by it."""
        before, self._heard = self._heard, self._heard + 1
        if likely >= BEGINS:
            self._quiet = None
            if not self.speech:
                self.speech = True
                return Change(max(0.0, before * CHUNK - MARGIN), speech=True)
        elif likely < ENDS and self.speech:
            if self._quiet is None:
                self._quiet = before
            if (before - self._quiet) * CHUNK >= SILENCE:
                at, self._quiet, self.speech = self._quiet * CHUNK + MARGIN, None, False
                return Change(at, speech=False)
        return None
