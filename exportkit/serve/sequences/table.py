"""The sequences of one package: which there are, and which step of each may run.

A state machine that takes the time as an argument, so that tests can choose it. One thread uses it. Its rules:

- The steps of a sequence run one after another, in the order in which they came.
- A step that was accepted and gets no answer ends its sequence: nobody knows whether it changed the state, and the
  steps behind it would run with a hole before them.
- Whoever begins a sequence that there is begins another one. The old one takes no more steps, answers those that it
  has, and ends.
- What is beyond a limit is refused, and changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

P = TypeVar("P")
S = TypeVar("S")

Reason = Literal["end", "restarted", "idle", "failed", "unanswered", "lost", "unloaded"]
"""Why a sequence ended.

end: its last step was answered. restarted: another one was begun in its place. idle: no step came for too long. failed:
the model failed on a step. unanswered: the client of a step left, or its timeout passed. lost: the process with its
state died. unloaded: the model was unloaded or replaced, or the server ended.
"""

REMEMBERED = 4096  # sequences that ended, of which it is known why


@dataclass(frozen=True)
class SequenceLimits:
    """The limits of a package's sequences.

    Attributes:
        most: The most sequences. 0: methods with state are not served.
        most_bytes: The most bytes of their state.
        idle_seconds: Seconds without a step after which a sequence ends.
        finish_seconds: Seconds for which sequences go on after their version was replaced or unloaded, or the server
            was told to end.
    """

    most: int = 1024
    most_bytes: int = 1 << 30
    idle_seconds: float = 60.0
    finish_seconds: float = 10.0


class SequencesFullError(Exception):
    """There are as many sequences, or bytes of state, as there may be."""


class NoSequenceError(Exception):
    """There is no such sequence.

    Attributes:
        reason: Why it ended; None: it never began, or ended long ago.
    """

    def __init__(self, reason: Reason | None) -> None:
        super().__init__(reason)
        self.reason = reason


class OpenSequence(Generic[P, S]):
    """A sequence.

    Attributes:
        key: Its name, and whose it is.
        payload: What the caller keeps for it, such as a session.
        size: The bytes of its state.
        began: When it began.
        steps: Those that are not answered: the first runs, the others wait.
        ended: Why it ended; None: it has not.
    """

    def __init__(self, key: Hashable, payload: P, size: int, began: float) -> None:
        self.key = key
        self.payload = payload
        self.size = size
        self.began = began
        self.steps: deque[S] = deque()
        self.ended: Reason | None = None
        self.closing: Reason | None = None  # why it takes no more steps, and ends after those that it has
        self.idle_since = began  # since when no step runs, if none does


class SequenceTable(Generic[P, S]):
    """The sequences of one package.

    Attributes:
        size: The bytes of the state of those that have not ended.
        ended: How many ended, by reason.
    """

    def __init__(self, limits: SequenceLimits) -> None:
        self._limits = limits
        self._open: dict[Hashable, OpenSequence[P, S]] = {}  # those that take steps
        self._live: dict[OpenSequence[P, S], None] = {}  # those that have not ended
        # Those without a step, the longest idle first.
        self._resting: OrderedDict[OpenSequence[P, S], None] = OrderedDict()
        self._known: OrderedDict[Hashable, Reason] = OrderedDict()  # why those that ended last did
        self._new: list[OpenSequence[P, S]] = []  # that ended, and were not returned by `take_ended` yet
        self.size = 0
        self.ended: Counter[Reason] = Counter()

    @property
    def count(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._live)

    def __iter__(self) -> Iterator[OpenSequence[P, S]]:
        """Yields the sequences that have not ended, the oldest first."""
        return iter(list(self._live))

    def begin(self, key: Hashable, payload: P, size: int, now: float) -> OpenSequence[P, S]:
        """Begins a sequence, in the place of one of the same key. It is idle until its first step.

        Raises:
            SequencesFullError: There are as many sequences or bytes as there may be. Nothing was changed.
        """
        old, limits = self._open.get(key), self._limits
        leaves = old is not None and not old.steps
        count, held = self.count - leaves, self.size - (old.size if old is not None and leaves else 0)
        if count >= limits.most:
            raise SequencesFullError(f"there are {count} sequences, and at most {limits.most} may be")
        if held + size > limits.most_bytes:
            raise SequencesFullError(
                f"the state of sequences has {held} bytes, and at most {limits.most_bytes} may be: "
                f"no room for {size} more"
            )
        if old is not None:
            self._close(old, "restarted")
        sequence: OpenSequence[P, S] = OpenSequence(key, payload, size, now)
        self._known.pop(key, None)
        self._open[key] = sequence
        self._live[sequence] = self._resting[sequence] = None
        self.size += size
        return sequence

    def find(self, key: Hashable) -> OpenSequence[P, S]:
        """Returns the sequence that takes the next step of this key. Raises NoSequenceError if there is none."""
        if (found := self._open.get(key)) is None:
            raise NoSequenceError(self._known.get(key))
        return found

    def submit(self, sequence: OpenSequence[P, S], step: S, *, last: bool) -> bool:
        """Adds a step to a sequence that takes steps. Returns whether it may run now.

        `last` says that the sequence ends after it.
        """
        if sequence.closing is not None or sequence.ended is not None:
            raise ValueError(f"the sequence {sequence.key!r} takes no more steps")
        sequence.steps.append(step)
        self._resting.pop(sequence, None)
        if last:
            self._close(sequence, "end")
        return len(sequence.steps) == 1

    def answered(self, sequence: OpenSequence[P, S], now: float) -> S | None:
        """The running step was answered. Returns the one that may run next."""
        if sequence.ended is not None:
            return None
        sequence.steps.popleft()
        if sequence.steps:
            return sequence.steps[0]
        if sequence.closing is not None:
            self._end(sequence, sequence.closing)
        else:
            sequence.idle_since = now
            self._resting[sequence] = None
        return None

    def end(self, sequence: OpenSequence[P, S], reason: Reason) -> list[S]:
        """Ends a sequence, if it has not. Returns the steps that waited, and will not run."""
        if sequence.ended is not None:
            return []
        waited = list(sequence.steps)[1:]
        self._end(sequence, reason)
        return waited

    def end_idle(self, now: float) -> None:
        """Ends the sequences to which no step came for too long."""
        while self._resting:
            longest = next(iter(self._resting))
            if now - longest.idle_since < self._limits.idle_seconds:
                return
            self._end(longest, "idle")

    def take_ended(self) -> list[OpenSequence[P, S]]:
        """Returns the sequences that ended since it was called last."""
        ended, self._new = self._new, []
        return ended

    def _close(self, sequence: OpenSequence[P, S], reason: Reason) -> None:
        """Lets a sequence take no more steps. It ends after those that it has."""
        sequence.closing = reason
        del self._open[sequence.key]
        self._remember(sequence.key, reason)
        if not sequence.steps:
            self._end(sequence, reason)

    def _end(self, sequence: OpenSequence[P, S], reason: Reason) -> None:
        sequence.ended = reason
        sequence.steps.clear()
        self._resting.pop(sequence, None)
        del self._live[sequence]
        self.size -= sequence.size
        self.ended[reason] += 1
        self._new.append(sequence)
        if self._open.get(sequence.key, sequence) is sequence:  # no other one has begun in its place
            self._open.pop(sequence.key, None)
            self._remember(sequence.key, reason)

    def _remember(self, key: Hashable, reason: Reason) -> None:
        self._known[key] = reason
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
