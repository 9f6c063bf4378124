"""How one result of a call compares with what was expected. Nothing here prints or imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exportkit.package.manifest import Accuracy


@dataclass(frozen=True)
class OutputError:
    """The error of one output against its reference, and the greatest that is allowed.

    Errors are relative to the reference's magnitude, or to its typical magnitude where that is greater.

    Attributes:
        rms: The root of the mean square.
        rms_allowed: The greatest allowed `rms`.
        greatest: The greatest error of an element.
        greatest_allowed: The greatest allowed `greatest`.
        greatest_at: The index of `greatest`; None if it is not known.
    """

    rms: float
    rms_allowed: float
    greatest: float
    greatest_allowed: float
    greatest_at: tuple[int, ...] | None

    @property
    def allowed(self) -> bool:
        """Whether the output is as accurate as eager."""
        return self.rms <= self.rms_allowed and self.greatest <= self.greatest_allowed

    def __str__(self) -> str:
        rms = f"rms error {self.rms:.3g} ({self.rms_allowed:.3g} allowed)"
        greatest = f"greatest error {self.greatest:.3g}{_at(self.greatest_at)} ({self.greatest_allowed:.3g} allowed)"
        return f"{rms}, {greatest}"


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output with its expected value.

    Attributes:
        name: The output's name in the manifest.
        dtype: The dtype of both tensors, such as "float32".
        shape: The shape of both tensors.
        compared: The number of compared elements. Rows whose indices differ are not compared.
        mismatched: The number of elements outside the tolerance, or with a greater error than allowed.
        max_abs: Greatest absolute difference from eager; inf if only one side is NaN or infinite; None if nothing was
            compared.
        max_abs_at: The index of `max_abs`.
        max_rel: Greatest difference relative to the expected value; inf if the expected value is 0.
        max_rel_at: The index of `max_rel`.
        rtol: The allowed relative tolerance: |actual - expected| <= atol + rtol * |expected|.
        atol: The allowed absolute tolerance.
        note: A remark, such as how many indices differ within a tie.
        error: The error, for an output with a reference; `rtol` and `atol` are then not used.
        call: The number of its call in a sequence; None for the state after it.
        moves: How far eager moves by itself when it rounds otherwise, if that explains the difference.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    compared: int
    mismatched: int
    max_abs: float | None
    max_abs_at: tuple[int, ...] | None
    max_rel: float | None
    max_rel_at: tuple[int, ...] | None
    rtol: float
    atol: float
    note: str | None = None
    error: OutputError | None = None
    call: int | None = 0
    moves: Accuracy | None = None

    @property
    def agrees(self) -> bool:
        """Whether the output is within its tolerance, or as accurate as eager."""
        return not self.mismatched and (self.error is None or self.error.allowed)

    @property
    def unjudged(self) -> bool:
        """Whether it differs by no more than eager moves by itself."""
        return not self.agrees and self.moves is not None

    def __str__(self) -> str:
        if self.compared == 0:
            text = "nothing to compare"
        elif self.error is not None:
            text = f"{'as accurate as eager' if self.agrees else 'less accurate than eager'}: {self.error}"
        elif self.mismatched:
            text = f"{self.mismatched} of {self.compared} elements differ ({self.mismatched / self.compared:.2%})"
        else:
            text = f"{self.compared} elements agree"
        if self.max_abs and self.error is None:
            text += f"; greatest absolute difference {self.max_abs:.3g}{_at(self.max_abs_at)} ({self.atol:.3g} allowed)"
            text += f", greatest relative difference {self.max_rel:.3g}{_at(self.max_rel_at)} ({self.rtol:.3g} allowed)"
        text = f"{self.name}: {text}" + (f"; {self.note}" if self.note else "")
        return f"{text}; {_UNJUDGED}" if self.unjudged else text


_UNJUDGED = "cannot be judged: eager moves by as much when it rounds otherwise"


@dataclass(frozen=True)
class PathFinding:
    """How far a gradient is off along a path, of what it is compared with.

    Attributes:
        wrong: Whether it differs by more than rounding and the rules of integration explain.
        off: The difference, relative to the change of the output along the path.
        visible: The least difference that would be seen; inf if the outputs are not finite.
        change: The change of the output along that path.
        work: What the gradient promises for it.
    """

    wrong: bool
    off: float
    visible: float
    change: float
    work: float


@dataclass(frozen=True)
class GradientFinding(PathFinding):
    """How a declared gradient compares with differences of what it is the gradient of.

    Attributes:
        output: The gradient.
        of: The output that it is the gradient of.
        input: The input that it is with respect to.
        scale: The factor that it is declared to have.
    """

    output: str
    of: str
    input: str
    scale: float

    @property
    def blind(self) -> bool:
        """Whether only a gradient that is quite another one would be seen."""
        return not self.wrong and self.visible >= 0.5

    def __str__(self) -> str:
        what = f"{self.scale:g} times the gradient of {self.of} with respect to {self.input}"
        if self.blind:
            why = (
                "rounding hides its changes"
                if math.isfinite(self.visible)
                else f"{self.of} does not change, or not finitely"
            )
            return f"whether {self.output} is {what} does not show here: {why}"
        if not self.wrong:
            return f"{self.output} is {what}: off by {self.off:.1g}, and more than {self.visible:.1g} would be seen"
        text = (
            f"{self.output} is not {what}: along a path, {self.of} changes by {self.change:.6g}, and {self.output} "
            f"promises {self.work:.6g}, off by {self.off:.2g}; more than {self.visible:.1g} is seen"
        )
        factor = self.work / self.change if self.change else 0.0
        if abs(factor + 1) < 0.01:
            return f"{text}. It has the other sign: scale={-self.scale:g}"
        return text


def _at(place: tuple[int, ...] | None) -> str:
    return "" if place is None else f" at {place}"
