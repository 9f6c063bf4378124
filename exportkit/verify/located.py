"""What a bisection found, and how it says so. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from exportkit.package.manifest import Accuracy, Manifest
from exportkit.verify.bisect_commands import CutPoint
from exportkit.verify.outcomes import Mismatch, Verdict

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
    was not tested. If a cut cannot be tested, its neighbours are tested then.
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


FUSION = (
    "Each cut makes values results that the whole model keeps inside, which changes what the compiler fuses. A "
    "difference that comes from fusion may therefore vanish, or appear at another node."
)


@dataclass(frozen=True)
class NodeError:
    """A value after a cut that differs.

    Attributes:
        name: The name of its node.
        message: How the compiled code's value differs, as a verification says it.
        compiled: The compiled code's error against the float64 reference; None if there is no reference.
        eager: Eager's error against the same reference.
    """

    name: str
    message: str
    compiled: Accuracy | None
    eager: Accuracy | None


@dataclass(frozen=True)
class Located:
    """What a bisection found.

    Attributes:
        label: The check of the verification that it began with.
        sizes: The sizes of that check's case, by dimension.
        target: The target that differs.
        points: The nodes after which the graph can be cut.
        search: Which cuts were tested, and where they begin to fail.
        verdict: How the first failing cut fails; None if the whole graph, compiled again, agrees.
        errors: The values that differ after the first failing cut.
        wrong: Whether the check showed that something is wrong; else it could not be judged.
    """

    label: str
    sizes: dict[str, int]
    target: str
    points: tuple[CutPoint, ...]
    search: Bisection
    verdict: Verdict | None
    errors: tuple[NodeError, ...]
    wrong: bool = True

    @property
    def point(self) -> CutPoint | None:
        """The node after which values begin to differ."""
        return None if self.search.fails is None else self.points[self.search.fails]

    @property
    def place(self) -> str:
        """The node, its operator and the line of the model."""
        assert self.search.fails is not None
        return self._node(self.search.fails)

    @property
    def message(self) -> str:
        """The finding, in lines."""
        case, search = f"{self.label} of {self.target}", self.search
        if self.point is None:
            why = search.tested[len(self.points) - 1]
            if isinstance(why, str):
                return f"the whole graph could not be compiled again for {case}: {why}"
            if not self.wrong:
                return (
                    f"every node agrees with eager for {case}, along the decisions that eager takes.\n"
                    "So nothing is wrong: the code decides otherwise where eager's own rounding decides."
                )
            return (
                f"the whole graph, traced and compiled again, agrees with eager for {case}.\n"
                "So the difference comes from the artifact: from another build of the code or of a library, from other "
                "options of the compiler, or from a model that has changed since."
            )
        lines = [f"first difference: {self.place}", f"for {case}"]
        lines += [f"  {error.message}{_against_eager(error)}" for error in self.errors]
        if not self.errors and self.verdict is not None:
            lines += [f"  {line}" for line in self.verdict.message.splitlines()]
        if search.passes is not None:
            lines.append(f"the graph up to {self._node(search.passes)} agrees")
        if search.undecided:
            lines.append(
                f"nodes before it that were not decided: {len(search.undecided)}; one of them may be the first"
            )
            lines += [f"  {self.points[cut].name}: {search.tested[cut]}" for cut in search.undecided[:4]]
        elif self.errors and not any(error.name in self.point.values for error in self.errors):
            lines.append("only values of earlier nodes differ, which agreed after an earlier cut: fusion decides")
        lines.append(f"{len(search.tested)} cuts of {len(self.points)} were tested. {FUSION}")
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Returns all of it as JSON."""
        point, search = self.point, self.search
        return {
            "message": self.message,
            "node": None if point is None else {"number": search.fails, **msgspec.to_builtins(point)},
            "exact": point is not None and not search.undecided,
            "errors": [msgspec.to_builtins(error) for error in self.errors],
            "case": {"label": self.label, "sizes": self.sizes, "target": self.target},
            "nodes": len(self.points),
            "tested": {self.points[cut].name: outcome for cut, outcome in sorted(search.tested.items())},
        }

    def _node(self, cut: int) -> str:
        point = self.points[cut]
        where = f", {point.where}" if point.where else ""
        return f"node {cut + 1} of {len(self.points)}, {point.name} ({point.operator}){where}"


def _against_eager(error: NodeError) -> str:
    if error.eager is None:
        return ""
    return f"; eager's own errors: rms {error.eager.rms:.3g}, greatest {error.eager.greatest:.3g}"


def node_errors(verdict: Verdict, manifest: Manifest) -> tuple[NodeError, ...]:
    """Returns the values that differ, with eager's errors in the same case."""
    if not isinstance(verdict, Mismatch):
        return ()
    eager = manifest.cases[0].calls[0].accuracy
    return tuple(
        NodeError(
            name=output.name,
            message=str(output),
            compiled=Accuracy(rms=output.error.rms, greatest=output.error.greatest) if output.error else None,
            eager=eager.get(output.name),
        )
        for output in verdict.outputs
        if not output.agrees
    )
