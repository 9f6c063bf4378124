"""How long a batch takes, and whether requests of a shape are faster together than one by one, as times show.

On a GPU a batch nearly always is. On a CPU it may gain nothing, and its inputs are copied to bring them together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

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
    """The expected time of a batch by its shape and rows, for the shapes that ran last.

    An estimate refuses requests, and a refused request brings no new measurement. So every rule here errs towards a
    time that is too short: then a request runs, and its time corrects the estimate.
    """

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


LEAST_GAIN = 0.05  # One by one must be faster by this part, because batches spare work outside of the model too.
# So much of the time is spent on trials of the slower way, as either may have changed; less if it is a lot slower.
TRIALS = 1 / 32
WINDOW = 11  # runs, of which the lower quartile counts: other work of the machine makes runs slower, and none faster


@dataclass
class _Timing:
    """The times of one way.

    Attributes:
        run_time: The seconds that a run takes.
        row_time: The seconds that a run takes for each of its rows.
    """

    run_time: float = 0.0
    row_time: float = 0.0
    _runs: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _rows: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, rows: int, seconds: float) -> None:
        self._runs.append(seconds)
        self._rows.append(seconds / rows)
        self.run_time, self.row_time = _lower_quartile(self._runs), _lower_quartile(self._rows)

    @property
    def known(self) -> bool:
        """Whether enough runs were timed: on a GPU the first ones of each size also load kernels and take memory."""
        return len(self._runs) == WINDOW


@dataclass
class _Shape:
    """Both ways, and their trials.

    Attributes:
        requests: Of the last run.
        trying_together: The way that the last trial is about.
        in_trial: The runs that are left of it.
        since_trial: The seconds that requests have run since it began.
    """

    alone: _Timing = field(default_factory=_Timing)
    together: _Timing = field(default_factory=_Timing)
    requests: int = 1
    trying_together: bool = True
    in_trial: int = 0
    since_trial: float = 0.0

    def decide_together(self) -> bool:
        if self.in_trial:
            self.in_trial -= 1
            return self.trying_together
        if not self.together.known:
            return True
        if not self.alone.known:
            return self._begin_trial(together=False)
        faster_together = self._faster_together
        faster, slower = (self.together, self.alone) if faster_together else (self.alone, self.together)
        if self.since_trial * TRIALS * faster.row_time < self._trial_runs * slower.run_time * slower.row_time:
            return faster_together
        return self._begin_trial(together=not faster_together)

    @property
    def _faster_together(self) -> bool:
        return self.alone.row_time > (1 - LEAST_GAIN) * self.together.row_time

    @property
    def _trial_runs(self) -> int:
        """The runs of a trial.

        The first are slowed down by what the last run left behind: answers to send, and the next requests. They are as
        many as it had requests, and are forgotten at the end of the trial.
        """
        return self.requests + WINDOW

    def _begin_trial(self, *, together: bool) -> bool:
        self.trying_together, self.in_trial, self.since_trial = together, self._trial_runs - 1, 0.0
        return together


def _lower_quartile(times: Iterable[float]) -> float:
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


class BatchBenefit:
    """The times of both ways, for the shapes that ran last."""

    def __init__(self) -> None:
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()

    def record(self, shape: Hashable, requests: int, rows: int, seconds: float) -> None:
        """Records the time of a batch of `requests` requests with `rows` rows."""
        known = self._shapes.get(shape)
        if known is None:
            known = self._shapes[shape] = _Shape()
        self._shapes.move_to_end(shape)
        if len(self._shapes) > MOST_SHAPES:
            self._shapes.popitem(last=False)
        (known.alone if requests == 1 else known.together).add(rows, seconds)
        known.requests = requests
        known.since_trial += seconds

    def decide_together(self, shape: Hashable) -> bool:
        """Decides whether the next of several requests run together, which may be a run of a trial or begin one."""
        known = self._shapes.get(shape)
        return known is None or known.decide_together()
