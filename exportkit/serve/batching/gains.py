"""Whether requests of a bucket are answered faster together than one by one, as their times show.

On a GPU a batch nearly always is. On a CPU it may gain nothing, and its inputs are copied to bring them together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from exportkit.serve.batching.estimates import MOST_BUCKETS, OUTLIER, SHORTEST, WEIGHT

LEAST_GAIN = 0.05  # One by one must be faster by this part, because batches spare work outside of the model too.
RETRY = 32  # So many times the faster way is chosen, then the other way once, because either may have changed.


@dataclass
class _RowTime:
    """The mean seconds of a row."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Takes a measurement into the mean. Of the first two the lower stands: the first is often slow."""
        if self.count < 2:
            self.seconds = seconds if self.count == 0 else min(self.seconds, seconds)
        else:
            seconds = min(seconds, OUTLIER * max(self.seconds, SHORTEST))
            self.seconds += WEIGHT * (seconds - self.seconds)
        self.count += 1


@dataclass
class _Bucket:
    """Both ways, and how often the faster one was chosen since the other."""

    alone: _RowTime = field(default_factory=_RowTime)
    together: _RowTime = field(default_factory=_RowTime)
    chosen: int = 0

    def next_together(self) -> bool:
        if self.together.count < 2:
            return True
        if self.alone.count < 2:
            return False
        faster_together = self.alone.seconds > (1 - LEAST_GAIN) * self.together.seconds
        self.chosen = (self.chosen + 1) % (RETRY + 1)
        return faster_together if self.chosen else not faster_together


class Gains:
    """The times of both ways, for the buckets that ran last."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def record(self, bucket: Hashable, requests: int, rows: int, seconds: float) -> None:
        """Records the time of a batch of `requests` requests with `rows` rows."""
        known = self._buckets.setdefault(bucket, _Bucket())
        self._buckets.move_to_end(bucket)
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        (known.alone if requests == 1 else known.together).add(seconds / rows)

    def together(self, bucket: Hashable) -> bool:
        """Chooses how the next of several requests that could run together run."""
        known = self._buckets.get(bucket)
        return known is None or known.next_together()
