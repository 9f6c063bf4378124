"""Finds where a sequence of cuts begins to fail, with few tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Outcome = bool | str  # whether a cut fails, or why it cannot be tested


@dataclass(frozen=True)
class Bisection:
    """What a search found out.

    Attributes:
        passes: The last cut before `fails` that was tested and passed; None if none was.
        fails: The first cut that was tested and failed; None if the last one does not fail.
        tested: What came of each tested cut.
    """

    passes: int | None
    fails: int | None
    tested: Mapping[int, Outcome]

    @property
    def undecided(self) -> range:
        """The cuts before the failing one that could not be tested; one of them may be the first that fails."""
        return range(0 if self.passes is None else self.passes + 1, self.fails or 0)


def bisect(count: int, fails: Callable[[int], Outcome]) -> Bisection:
    """Searches for a cut that fails while the one before it passes.

    It is the first one that fails if all cuts after a failing one fail as well. If not, an earlier one may fail that
    was not tested.

    Args:
        count: The number of cuts, at least 1.
        fails: Tests a cut. If it cannot be tested, its neighbours are tested then.
    """
    tested = {count - 1: fails(count - 1)}
    if tested[count - 1] is not True:
        return Bisection(None, None, tested)
    passing, failing = -1, count - 1
    while open_cuts := [cut for cut in range(passing + 1, failing) if cut not in tested]:
        middle = (passing + failing) / 2
        cut = min(open_cuts, key=lambda each: (abs(each - middle), each))
        tested[cut] = fails(cut)
        if tested[cut] is True:
            failing = cut
        elif tested[cut] is False:
            passing = cut
    return Bisection(None if passing < 0 else passing, failing, tested)
