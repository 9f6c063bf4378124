"""The verdicts of a verification, as a closed union. Nothing here prints or imports torch.

Every verdict has a `kind` (its name in JSON), an `exit_code` (EXIT_CODES lists them for the documentation) and a
`message` that a person can act on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from exportkit.child.process import describe_end


@dataclass(frozen=True)
class OutputError:
    """The error of one output against its reference, and the greatest that is allowed.

    Errors are relative to the reference's magnitude, or to its typical magnitude where that is greater.

    Attributes:
        rms: The root of the mean square.
        rms_allowed: The greatest allowed `rms`.
        greatest: The greatest error of an element.
        greatest_allowed: The greatest allowed `greatest`.
        greatest_at: The index of `greatest`.
    """

    rms: float
    rms_allowed: float
    greatest: float
    greatest_allowed: float
    greatest_at: tuple[int, ...]

    @property
    def allowed(self) -> bool:
        """Whether the output is as accurate as eager."""
        return self.rms <= self.rms_allowed and self.greatest <= self.greatest_allowed

    def __str__(self) -> str:
        return (
            f"rms error {self.rms:.3g} ({self.rms_allowed:.3g} allowed), greatest error {self.greatest:.3g} at "
            f"{self.greatest_at} ({self.greatest_allowed:.3g} allowed)"
        )


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

    @property
    def agrees(self) -> bool:
        """Whether the output is within its tolerance, or as accurate as eager."""
        return not self.mismatched and (self.error is None or self.error.allowed)

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
            text += f"; greatest absolute difference {self.max_abs:.3g} at {self.max_abs_at} ({self.atol:.3g} allowed)"
            text += f", greatest relative difference {self.max_rel:.3g} at {self.max_rel_at} ({self.rtol:.3g} allowed)"
        return f"{self.name}: {text}" + (f"; {self.note}" if self.note else "")


# --- verdicts on one call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """Every output is as accurate as eager, or within its tolerance."""

    outputs: tuple[OutputComparison, ...]
    kind: ClassVar[str] = "match"
    exit_code: ClassVar[int] = 0

    @property
    def message(self) -> str:
        """One line."""
        count = f"{len(self.outputs)} outputs agree" if len(self.outputs) != 1 else "1 output agrees"
        worst = max((o for o in self.outputs if o.max_abs), key=lambda o: o.max_abs or 0.0, default=None)
        return count + (f", greatest absolute difference {worst.max_abs:.2g} in {worst.name}" if worst else " exactly")


@dataclass(frozen=True)
class Mismatch:
    """An output is less accurate than eager, or has values outside its tolerance."""

    outputs: tuple[OutputComparison, ...]
    kind: ClassVar[str] = "mismatch"
    exit_code: ClassVar[int] = 1

    @property
    def message(self) -> str:
        """A line for each output that differs."""
        return "\n".join(str(output) for output in self.outputs if not output.agrees)


@dataclass(frozen=True)
class WrongDtype:
    """An output's dtype differs from the manifest or from eager."""

    output: str
    expected: str
    actual: str
    kind: ClassVar[str] = "wrong_dtype"
    exit_code: ClassVar[int] = 10

    @property
    def message(self) -> str:
        """One line."""
        return f"output `{self.output}` is {self.actual}; {self.expected} was expected"


@dataclass(frozen=True)
class WrongShape:
    """An output's shape differs from eager's or from the manifest's. None is a size that may vary."""

    output: str
    expected: tuple[int | None, ...]
    actual: tuple[int, ...]
    kind: ClassVar[str] = "wrong_shape"
    exit_code: ClassVar[int] = 11

    @property
    def message(self) -> str:
        """One line."""
        return f"output `{self.output}` has shape {list(self.actual)}; {_shape(self.expected)} was expected"


def _shape(sizes: tuple[int | None, ...]) -> str:
    return f"[{', '.join('*' if size is None else str(size) for size in sizes)}]"


@dataclass(frozen=True)
class WrongStructure:
    """The outputs differ in nesting, names or number."""

    expected: str
    actual: str
    kind: ClassVar[str] = "wrong_structure"
    exit_code: ClassVar[int] = 11

    @property
    def message(self) -> str:
        """One line."""
        return f"the result is {self.actual}; {self.expected} was expected"


@dataclass(frozen=True)
class CallFailed:
    """The packaged model raised."""

    error: str
    detail: str
    kind: ClassVar[str] = "call_failed"
    exit_code: ClassVar[int] = 12

    @property
    def message(self) -> str:
        """The error's own text."""
        return f"the call raised {self.error}: {self.detail}"


@dataclass(frozen=True)
class Crashed:
    """The process of the packaged model or of eager died.

    Attributes:
        signal: The signal that killed it, or None.
        exit_status: Its exit status, or None if a signal killed it.
        doing: The work it was doing.
        output: The end of its output.
    """

    signal: int | None
    exit_status: int | None
    doing: str
    output: str
    kind: ClassVar[str] = "crashed"
    exit_code: ClassVar[int] = 13

    @property
    def message(self) -> str:
        """The signal's name and the end of what the process printed."""
        how = describe_end(-self.signal if self.signal is not None else self.exit_status or 0)
        printed = f"\n{self.output}" if self.output else ""
        return f"the process {how} while {self.doing}{printed}"


@dataclass(frozen=True)
class TimedOut:
    """The packaged model, or eager, did not answer in time."""

    seconds: float
    doing: str
    kind: ClassVar[str] = "timed_out"
    exit_code: ClassVar[int] = 14

    @property
    def message(self) -> str:
        """One line."""
        return f"no answer within {self.seconds:g} s while {self.doing}; --timeout sets the limit"


@dataclass(frozen=True)
class NotRun:
    """A call was left out because earlier calls failed."""

    reason: str
    kind: ClassVar[str] = "not_run"
    exit_code: ClassVar[int] = 0

    @property
    def message(self) -> str:
        """One line."""
        return f"not run: {self.reason}"


# --- verdicts on the package ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signed:
    """The package is signed by the required keys: one of the caller's, and one of each policy's."""

    key_ids: tuple[str, ...]
    kind: ClassVar[str] = "signed"
    exit_code: ClassVar[int] = 0

    @property
    def message(self) -> str:
        """One line."""
        return f"signed by {' and '.join(dict.fromkeys(self.key_ids))}"


@dataclass(frozen=True)
class MissingOperator:
    """No library of the package or of the command line defines an operator of the graph."""

    operator: str
    detail: str
    kind: ClassVar[str] = "missing_operator"
    exit_code: ClassVar[int] = 15

    @property
    def message(self) -> str:
        """The operator and what to do."""
        return f"operator `{self.operator}` is missing: {self.detail}"


@dataclass(frozen=True)
class LoadFailed:
    """The package could not be loaded. `exit_code` is the error's: 3 for the package, 4 for this machine."""

    error: str
    detail: str
    exit_code: int
    kind: ClassVar[str] = "load_failed"

    @property
    def message(self) -> str:
        """The error's own text."""
        return f"{self.error}: {self.detail}"


# --- verdicts on the eager model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagerUnavailable:
    """Nothing was compared with eager: the model cannot be made here, or its inputs are too large.

    This is a failure only if the comparison is `required`.
    """

    reason: str
    required: bool
    kind: ClassVar[str] = "eager_unavailable"

    @property
    def exit_code(self) -> int:
        """16 if the comparison is required, else 0: the recorded cases were compared."""
        return 16 if self.required else 0

    @property
    def message(self) -> str:
        """One line."""
        return f"no comparison with eager: {self.reason}"


@dataclass(frozen=True)
class EagerDiffers:
    """MODEL now has other weights than when it was exported."""

    expected_sha256: str
    actual_sha256: str
    model: str
    kind: ClassVar[str] = "eager_differs"
    exit_code: ClassVar[int] = 17

    @property
    def message(self) -> str:
        """Both digests, and what to do."""
        return (
            f"{self.model} has other parameters and buffers now (sha256 {self.actual_sha256[:16]}...) than when it "
            f"was exported ({self.expected_sha256[:16]}...): export it again, give the weights of the export "
            "(--weights), or compare with the recorded cases only (--against cases)"
        )


@dataclass(frozen=True)
class EagerFailed:
    """Eager itself failed: it cannot be made, or it refuses sizes that the package allows."""

    error: str
    detail: str
    doing: str
    kind: ClassVar[str] = "eager_failed"
    exit_code: ClassVar[int] = 18

    @property
    def message(self) -> str:
        """The error's own text, and what to do."""
        advice = (
            "fix the model, narrow its ranges (--dynamic at export), or compare with the cases only (--against cases)"
        )
        if _MISSING_OPERATOR.search(self.detail):
            advice = "give the library that defines the operator with --op-library, or compare with --against cases"
        return f"{self.error} while {self.doing}: {self.detail}\n{advice}"


# torch's messages for an unregistered operator: as an attribute of torch.ops, and when a fake or kernel is added.
_MISSING_OPERATOR = re.compile(r"'_OpNamespace' .* has no attribute|operator \S+ does not exist")

Verdict = (
    Match
    | Mismatch
    | WrongDtype
    | WrongShape
    | WrongStructure
    | CallFailed
    | Crashed
    | TimedOut
    | NotRun
    | Signed
    | MissingOperator
    | LoadFailed
    | EagerUnavailable
    | EagerDiffers
    | EagerFailed
)

# Exit code -> meaning, for --help and docs/cli.md. A test holds it against the classes above and exportkit.errors.
EXIT_CODES: Mapping[int, str] = {
    0: "success",
    1: "a check failed: an output's values differ",
    2: "wrong usage: an argument is invalid, or MODEL cannot be found",
    3: "the package is bad, tampered with, incomplete, or lacks a required signature",
    4: "this machine cannot do it: no compiler, no CUDA, another torch, or no target that runs here",
    10: "verify: an output has the wrong dtype",
    11: "verify: an output has the wrong shape, or the result the wrong structure",
    12: "verify: the packaged model raised an error",
    13: "verify: the process of the packaged model or of eager crashed",
    14: "verify: the packaged model or eager did not answer in time",
    15: "verify: an operator is missing",
    16: "verify --against eager: the eager model cannot be made here, or all sizes exceed --max-input-mb",
    17: "verify: the eager model has other weights than when it was exported",
    18: "verify: eager itself fails, at a size inside the exported range or when it is made",
    70: "a bug in exportkit; stderr has a traceback",
    130: "interrupted",
}
