"""The report of a verification, check by check. Nothing here prints or imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from exportkit.verify.outcomes import Verdict

Against = Literal["package", "cases", "sessions", "gradients", "eager"]


@dataclass(frozen=True)
class Check:
    """One check and its verdict.

    Attributes:
        against: "package" for loading, "cases" for a recorded case, "sessions" for what sessions promise, "gradients"
            for outputs that are gradients of others, "eager" for a comparison with the eager model.
        label: The check's name, such as "case 0" or "batch=64, gh=8, gw=8".
        sizes: The dimensions of the calls, by name.
        verdict: The result.
        seconds: The time of the calls, including input checks; None if the model was not called.
        target: The checked target, as TargetReport names it; None if the check covers all targets.
        calls: The number of calls that were made, but for those below.
        edge_cases: The number of calls with edge values.
        layouts: How many of all calls were made again with inputs in other layouts.
    """

    against: Against
    label: str
    sizes: Mapping[str, int]
    verdict: Verdict
    seconds: float | None = None
    target: str | None = None
    calls: int = 0
    edge_cases: int = 0
    layouts: int = 0

    @property
    def failed(self) -> bool:
        """Whether this check keeps the verification from success."""
        return self.verdict.exit_code != 0

    @property
    def wrong(self) -> bool:
        """Whether it shows that something is wrong."""
        return self.verdict.wrong


@dataclass(frozen=True)
class TargetReport:
    """The run of one target, of the exported program, or of an ONNX model.

    Attributes:
        name: The target's name; "program" for an exported program, "onnx" for an ONNX model.
        device: The device, such as "cpu" or "cuda:0"; None if the target was not run.
        load_seconds: The time of exportkit.load in the fresh process, without importing torch; None if not loaded.
        left_out: The reason the target was not run, or None.
    """

    name: str
    device: str | None = None
    load_seconds: float | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class Report:
    """The result of a verification.

    Attributes:
        artifact: The verified file.
        torch: The version of torch that ran it; None if nothing was loaded, or for an ONNX model.
        targets: All targets. The ones that were run come first, the best of them first.
        checks: The checks in the order they were made.
        skipped: Sizes that were not compared with eager, each with the reason.
        onnxruntime: The version of ONNX Runtime that ran it; None if it is not a loaded ONNX model.
        manifest_sha256: The hex digest of its manifest, which identifies its content; None if it could not be read.
    """

    artifact: str
    torch: str | None
    targets: tuple[TargetReport, ...]
    checks: tuple[Check, ...]
    skipped: tuple[str, ...] = ()
    onnxruntime: str | None = None
    manifest_sha256: str | None = None

    @property
    def failure(self) -> Check | None:
        """The first check that shows that something is wrong; else the first that cannot be judged."""
        return min((check for check in self.checks if check.failed), key=lambda check: not check.wrong, default=None)

    @property
    def wrong(self) -> bool:
        """Whether something is wrong."""
        return any(check.wrong for check in self.checks)

    @property
    def exit_code(self) -> int:
        """The exit code of `failure`, else 0."""
        return self.failure.verdict.exit_code if self.failure else 0
