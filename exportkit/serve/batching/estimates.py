"""How long a batch will probably take, from those that ran.

An estimate refuses requests, and a refused request brings no new measurement. So every rule here errs towards a time
that is too short: then a request runs, and its time corrects the estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

WEIGHT = 0.25  # of the newest measurement
OUTLIER = 4.0  # A batch that took longer than so many times the mean counts as so many times the mean.
SHORTEST = 1e-3  # seconds; or a mean of zero would make every later batch an outlier
TRUST = 10.0  # A mean is believed for so many times itself after its last measurement,
TRUST_AT_LEAST, TRUST_AT_MOST = 1.0, 60.0  # within these seconds.
MOST_SHAPES = 256


@dataclass
class _Mean:
    """The mean time of batches of about as many rows."""

    seconds: float
    count: int
    measured: float

    def add(self, seconds: float, now: float) -> None:
        """Takes a measurement into the mean.

        The minimum of the first two measurements is used, because the first is often slow; likewise after the mean
        expired.
        """
        if not self.believed(now):
            self.seconds = min(self.seconds, seconds)
        else:
            seconds = min(seconds, OUTLIER * max(self.seconds, SHORTEST))
            self.seconds += WEIGHT * (seconds - self.seconds)
        self.count += 1
        self.measured = now

    def believed(self, now: float) -> bool:
        trusted = min(max(TRUST * self.seconds, TRUST_AT_LEAST), TRUST_AT_MOST)
        return self.count > 1 and now - self.measured <= trusted


class Estimates:
    """The expected time of a batch by its shape and rows, for the shapes that ran last."""

    def __init__(self, most_shapes: int = MOST_SHAPES) -> None:
        self._most = most_shapes
        self._means: OrderedDict[Hashable, dict[int, _Mean]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def record(self, shape: Hashable, rows: int, seconds: float, now: float) -> None:
        """Records that a batch of `rows` rows took `seconds` and was ready at `now`."""
        means = self._means.setdefault(shape, {})
        self._means.move_to_end(shape)
        if len(self._means) > self._most:
            self._means.popitem(last=False)
        mean = means.get(_power(rows))
        if mean is None:
            means[_power(rows)] = _Mean(seconds, 1, now)
        else:
            mean.add(seconds, now)

    def seconds(self, shape: Hashable, rows: int, now: float) -> float:
        """Returns the time that a batch will take, or that a smaller one took; 0.0 if that is not known."""
        means = self._means.get(shape)
        if means is not None:
            for power in range(_power(rows), -1, -1):
                mean = means.get(power)
                if mean is not None and mean.believed(now):
                    return mean.seconds
        return 0.0


def _power(rows: int) -> int:
    """Batches share a mean if the next power of two is the same for their rows."""
    return (rows - 1).bit_length()
