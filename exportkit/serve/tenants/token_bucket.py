"""A limit of a rate: a bucket of tokens that fills as time passes."""

from __future__ import annotations

import math

_ROUNDING = 1e-9  # seconds: who waited as long as he was told is not told to wait again


class TokenBucket:
    """Takes the time as an argument, so that tests can choose it.

    It begins full. What is taken may be more than is there: then nothing can be taken until the debt is paid. So in
    any span of T seconds at most `capacity + rate * T` tokens are taken, and what the last one took beyond one.
    """

    def __init__(self, rate: float, capacity: float) -> None:
        """`rate` tokens come each second, until there are `capacity`: at least 1."""
        self.rate = rate
        self.capacity = max(capacity, 1.0)
        self._full_at = -math.inf  # one number says it all: when it is full again if nothing more is taken

    def wait(self, now: float) -> float:
        """Returns the seconds until a token can be taken; 0: now."""
        missing = self._full_at - now - (self.capacity - 1) / self.rate
        return missing if missing > _ROUNDING else 0.0

    def take(self, now: float, tokens: float = 1) -> None:
        """Takes tokens, whether they are there or not."""
        self._full_at = max(self._full_at, now) + tokens / self.rate
