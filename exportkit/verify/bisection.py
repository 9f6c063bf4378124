"""Finds where a sequence of cuts begins to fail, with few tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bisection:
    """What a search found out.

    Attributes:
        count: The number of cuts.
        passes: The last cut before `fails` that was tested and passed; None if none was.
        fails: The first cut that was tested and failed; None if the last one does not fail.
        tested: The result of each tested cut: whether it failed, or None if it could not be tested.
    """

    count: int
    passes: int | None
    fails: int | None
    tested: Mapping[int, bool | None]

    @property
    def exact(self) -> bool:
        """Whether the cut before the failing one passed, or there is none."""
        return self.fails is not None and self.fails == (0 if self.passes is None else self.passes + 1)


def bisect(count: int, fails: Callable[[int], bool | None], *, budget: int | None = None) -> Bisection:
    """Searches for a cut that fails while the one before it passes.

    It is the first one that fails if all cuts after a failing one fail as well. If not, an earlier one may fail that
    was not tested.

    Args:
        count: The number of cuts, at least 1.
        fails: Tests a cut. None means that it cannot be tested; its neighbours are tested then.
        budget: The number of cuts to test, at least 1. None tests as many as needed.
    """
    tested: dict[int, bool | None] = {count - 1: fails(count - 1)}
    if not tested[count - 1]:
        return Bisection(count, None, None, tested)
    passing, failing = -1, count - 1
    while budget is None or len(tested) < budget:
        middle = (passing + failing) / 2
        open_cuts = [cut for cut in range(passing + 1, failing) if cut not in tested]
        if not open_cuts:
            break
        cut = min(open_cuts, key=lambda each: (abs(each - middle), each))
        tested[cut] = fails(cut)
        if tested[cut]:
            failing = cut
        elif tested[cut] is False:
            passing = cut
    return Bisection(count, None if passing < 0 else passing, failing, tested)
