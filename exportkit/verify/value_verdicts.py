"""What every verdict has, and the verdicts on values. Nothing here prints or imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from exportkit.verify.comparisons import OutputComparison
from exportkit.verify.filled_memory import Content

_MOST_LINES = 12  # of results that differ; a sequence may have thousands


class VerdictBase:
    """What all verdicts have. A class gives it by keyword; only what depends on the values is written out."""

    kind: str
    _message: ClassVar[str]
    _exit_code: int

    def __init_subclass__(cls, *, kind: str, exit_code: int = 0, message: str = "") -> None:
        """`message` may name attributes in braces."""
        cls.kind, cls._exit_code, cls._message = kind, exit_code, message

    @property
    def exit_code(self) -> int:
        """The exit code of a verification that ends with this verdict; 0 if it is no failure."""
        return self._exit_code

    @property
    def wrong(self) -> bool:
        """Whether something is wrong. What cannot be judged is neither right nor wrong."""
        return self.exit_code != 0

    @property
    def message(self) -> str:
        """What a person can act on, usually in one line."""
        return self._message.format_map(vars(self))


@dataclass(frozen=True)
class Match(VerdictBase, kind="match"):
    """Every output is as accurate as eager, or within its tolerance."""

    outputs: tuple[OutputComparison, ...]

    @property
    def message(self) -> str:
        """How many agree, and how nearly."""
        count = f"{len(self.outputs)} outputs agree" if len(self.outputs) != 1 else "1 output agrees"
        worst = max((o for o in self.outputs if o.max_abs), key=lambda o: o.max_abs or 0.0, default=None)
        return count + (
            f", greatest absolute difference {worst.max_abs:.2g} in {_named(worst.name)}" if worst else " exactly"
        )


@dataclass(frozen=True)
class Mismatch(VerdictBase, kind="mismatch", exit_code=1):
    """An output is less accurate than eager, or has values outside its tolerance.

    Attributes:
        outputs: All outputs.
        memory: What memory has to be filled with before the call, for this to be seen; "" if it is seen anyhow.
    """

    outputs: tuple[OutputComparison, ...]
    memory: Content = ""

    @property
    def message(self) -> str:
        """A line for each output that differs, of the first ones."""
        lines = _first([str(output) for output in self.outputs if not output.agrees])
        if self.memory:
            lines.append(f"but agrees where memory was not filled with {self.memory}: it reads what nothing wrote")
        return "\n".join(lines)


@dataclass(frozen=True)
class Unjudged(VerdictBase, kind="unjudged", exit_code=21):
    """Outputs differ from eager's by no more than eager moves by itself when it rounds otherwise. The others agree."""

    outputs: tuple[OutputComparison, ...]
    wrong = False

    @property
    def message(self) -> str:
        """A line for each output that cannot be judged, of the first ones, and how many agree."""
        lines = [str(output) for output in self.outputs if not output.agrees]
        agree = len(self.outputs) - len(lines)
        return "\n".join([*_first(lines), *([f"{agree} more that agree"] if agree else [])])


Judged = Match | Mismatch | Unjudged
"""What a comparison of values says."""


def judged(outputs: Iterable[OutputComparison]) -> Judged:
    """Returns the verdict on results that were compared."""
    found = tuple(outputs)
    if all(output.agrees for output in found):
        return Match(found)
    return Unjudged(found) if all(output.agrees or output.unjudged for output in found) else Mismatch(found)


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {more} more results"] if more > 0 else lines


def _named(output: str) -> str:
    """Returns how a sentence names an output; one without a name is called by its number."""
    return f"output {output}" if output.isdecimal() else output
