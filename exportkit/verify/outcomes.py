"""The verdicts of a verification, as a closed union. Nothing here prints or imports torch.

Every verdict has a `kind` (its name in JSON), an `exit_code` (of exportkit.errors.EXIT_CODES) and a `message`.
"""

from __future__ import annotations

import re
from dataclasses import InitVar, dataclass
from typing import Self

from exportkit.child.process import describe_end
from exportkit.errors import ExportkitError
from exportkit.verify.comparisons import GradientFinding
from exportkit.verify.value_verdicts import Match, Mismatch, Unjudged, VerdictBase

# --- verdicts on one call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrongDtype(
    VerdictBase, kind="wrong_dtype", exit_code=10, message="output `{output}` is {actual}; {expected} was expected"
):
    """An output's dtype differs from the manifest or from eager."""

    output: str
    expected: str
    actual: str


@dataclass(frozen=True)
class WrongShape(VerdictBase, kind="wrong_shape", exit_code=11):
    """An output's shape differs from eager's or from the manifest's. None is a size that may vary."""

    output: str
    expected: tuple[int | None, ...]
    actual: tuple[int, ...]

    @property
    def message(self) -> str:
        """Both shapes."""
        expected = ", ".join("*" if size is None else str(size) for size in self.expected)
        return f"output `{self.output}` has shape {list(self.actual)}; [{expected}] was expected"


@dataclass(frozen=True)
class WrongStructure(
    VerdictBase, kind="wrong_structure", exit_code=11, message="the result{call} is {actual}; {expected} was expected"
):
    """The outputs differ in nesting, names or number. `call` is such as ` of call 3`, in a sequence."""

    expected: str
    actual: str
    call: str = ""


@dataclass(frozen=True)
class CallFailed(VerdictBase, kind="call_failed", exit_code=12, message="{call} raised {error}: {detail}"):
    """The packaged model raised."""

    error: str
    detail: str
    call: str = "the call"


@dataclass(frozen=True)
class RefusedToo(VerdictBase, kind="refused", message="refused, as eager does"):
    """The packaged model raised where eager refuses a value."""


@dataclass(frozen=True)
class NotRefused(
    VerdictBase, kind="not_refused", exit_code=1, message="eager refuses this value, and the package answers"
):
    """The packaged model answered where eager refuses a value."""


@dataclass(frozen=True)
class Crashed(VerdictBase, kind="crashed", exit_code=13):
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

    @property
    def message(self) -> str:
        """The signal's name and the end of what the process printed."""
        how = describe_end(-self.signal if self.signal is not None else self.exit_status or 0)
        printed = f"\n{self.output}" if self.output else ""
        return f"the process {how} while {self.doing}{printed}"


@dataclass(frozen=True)
class TimedOut(
    VerdictBase,
    kind="timed_out",
    exit_code=14,
    message="no answer within {seconds:g} s while {doing}; --timeout sets the limit",
):
    """The packaged model, or eager, did not answer in time."""

    seconds: float
    doing: str


@dataclass(frozen=True)
class NotRun(VerdictBase, kind="not_run", message="not run: {reason}"):
    """A call was left out because earlier calls failed."""

    reason: str


# --- verdicts on gradients --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientsHold(VerdictBase, kind="gradients_hold"):
    """Outputs that are declared to be gradients agree with differences, as far as those can tell.

    Attributes:
        findings: One for each gradient.
        who: "eager", or empty for the package.
    """

    findings: tuple[GradientFinding, ...]
    who: str = ""

    @property
    def message(self) -> str:
        """A line for each gradient."""
        return "\n".join(map(str, self.findings))


@dataclass(frozen=True)
class WrongGradient(VerdictBase, kind="wrong_gradient", exit_code=20):
    """An output is not the gradient that it is declared to be.

    Attributes:
        findings: The wrong ones.
        who: "eager", or empty for the package.
    """

    findings: tuple[GradientFinding, ...]
    who: str = ""

    @property
    def message(self) -> str:
        """A line for each wrong gradient, and where to look."""
        lines = "\n".join(map(str, self.findings))
        if not self.who:
            return lines
        return (
            f"in eager itself, {lines}\nan operator that the model calls may have a wrong gradient: `exportkit ops "
            "check MODEL` compares those of custom operators with numeric derivatives"
        )


# --- verdicts on sessions ---------------------------------------------------------------------------------------------
# Each compares with the same calls made one after another in a session of their own. `difference` says where the
# answers part.


@dataclass(frozen=True)
class SessionsAgree(VerdictBase, kind="sessions_agree", message="{calls} calls, {how}"):
    """Sessions answer as one that has all calls to itself."""

    calls: int
    how: str


_BROKEN = {
    "shared_state": "sessions share state: the answers of one depend on the calls of another",
    "fork_without_state": "fork does not copy the state: the copy does not go on where the session was",
    "fork_shares_state": "fork shares the state: the session sees what is done to its copy",
    "reset_incomplete": "reset does not restore the state that a session begins with",
    "saved_state_differs": "a session that loads a saved state does not go on where it was saved",
}


@dataclass(frozen=True)
class SessionsDiffer(VerdictBase, kind="", exit_code=19):
    """A session does not keep a promise. The kind says which."""

    difference: str
    kind: str

    @property
    def message(self) -> str:
        """The promise, and the first difference."""
        return f"{_BROKEN[self.kind]}. {self.difference}"


# --- verdicts on the package ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signed(VerdictBase, kind="signed"):
    """The package is signed by the required keys: one of the caller's, and one of each policy's."""

    key_ids: tuple[str, ...]

    @property
    def message(self) -> str:
        """The keys, each once."""
        return f"signed by {' and '.join(dict.fromkeys(self.key_ids))}"


@dataclass(frozen=True)
class MissingOperator(
    VerdictBase, kind="missing_operator", exit_code=15, message="operator `{operator}` is missing: {detail}"
):
    """No library of the package or of the command line defines an operator of the graph."""

    operator: str
    detail: str


@dataclass(frozen=True)
class LoadFailed(VerdictBase, kind="load_failed", message="{error}: {detail}"):
    """The package could not be loaded. The exit code is the error's: 3 for the package, 4 for this machine."""

    error: str
    detail: str
    code: InitVar[int]

    def __post_init__(self, code: int) -> None:
        object.__setattr__(self, "_exit_code", code)

    @classmethod
    def of(cls, error: ExportkitError) -> Self:
        """Describes an error."""
        return cls(type(error).__name__, str(error), error.exit_code)


# --- verdicts on the eager model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagerUnavailable(
    VerdictBase, kind="eager_unavailable", exit_code=16, message="not compared with eager: {reason}"
):
    """Nothing was compared with eager: the model cannot be made here, or its inputs are too large.

    This is a failure only if the comparison is `required`; else the recorded cases were compared.
    """

    reason: str
    required: bool

    @property
    def exit_code(self) -> int:
        """0 if the comparison is not required."""
        return self._exit_code if self.required else 0


@dataclass(frozen=True)
class EagerDiffers(VerdictBase, kind="eager_differs", exit_code=17):
    """MODEL now has other weights than when it was exported."""

    expected_sha256: str
    actual_sha256: str
    model: str

    @property
    def message(self) -> str:
        """Both digests, and what to do."""
        return (
            f"{self.model} has other parameters and buffers now (sha256 {self.actual_sha256[:16]}...) than when it "
            f"was exported ({self.expected_sha256[:16]}...): export it again, give the weights of the export "
            "(--weights), or compare with the recorded cases only (--against cases)"
        )


@dataclass(frozen=True)
class EagerFailed(VerdictBase, kind="eager_failed", exit_code=18):
    """Eager itself failed: it cannot be made, or it refuses sizes that the package allows."""

    error: str
    detail: str
    doing: str

    @property
    def message(self) -> str:
        """The error's own text, and what to do."""
        advice = (
            "fix the model, narrow its ranges (--dynamic at export), or compare with the cases only (--against cases)"
        )
        if "--op-library" in self.detail:
            advice = "or compare with --against cases"
        elif _MISSING_OPERATOR.search(self.detail):
            advice = "give the library that defines the operator with --op-library, or compare with --against cases"
        return f"{self.error} while {self.doing}: {self.detail}\n{advice}"


# torch's messages for an unregistered operator: as an attribute of torch.ops, and when a fake or kernel is added.
_MISSING_OPERATOR = re.compile(r"'_OpNamespace' .* has no attribute|operator \S+ does not exist")

Verdict = (
    Match
    | Mismatch
    | Unjudged
    | WrongDtype
    | WrongShape
    | WrongStructure
    | CallFailed
    | RefusedToo
    | NotRefused
    | Crashed
    | TimedOut
    | NotRun
    | GradientsHold
    | WrongGradient
    | SessionsAgree
    | SessionsDiffer
    | Signed
    | MissingOperator
    | LoadFailed
    | EagerUnavailable
    | EagerDiffers
    | EagerFailed
)
