"""The options of a verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exportkit.package.trust import Trust
from exportkit.reference_model import ReferenceModel

Against = Literal["cases", "eager", "both"]
RunBy = Literal["python", "cpp"]


@dataclass(frozen=True)
class VerifyOptions:
    """Selects the comparisons of a verification.

    Attributes:
        against: Compare with recorded cases, the eager model, or both. "both" skips an eager model that cannot be made.
        cases: The numbers of the recorded cases to replay, each as often as it is named. Default: all.
        shapes: The number of sizes to compare with eager.
        rtol: Replaces, together with `atol`, the recorded tolerances of floating outputs.
        atol: See `rtol`.
        device: "auto" for every target that runs here; "cpu", "cuda" or "cuda:1" for the targets of that device.
        target: The name of the only target to run.
        eager: The eager model, and operator libraries that the artifact calls but does not contain.
        seed: The seed of the sizes and inputs for eager.
        timeout: Seconds a call may take. Loading, which imports torch, always gets at least 600.
        max_input_bytes: The limit on the inputs of one call. Larger sizes are skipped and reported.
        trust: Who must have signed the artifact.
        runner: What replays the recorded cases: exportkit's runtime, or exportkit-run, which is all in C++ and makes no
            comparison with eager or between sessions.
    """

    against: Against = "both"
    cases: tuple[int, ...] = ()
    shapes: int = 8
    rtol: float | None = None
    atol: float | None = None
    device: str = "auto"
    target: str | None = None
    eager: ReferenceModel = ReferenceModel()
    seed: int = 0
    timeout: float = 600.0
    max_input_bytes: int = 32 * 10**6
    trust: Trust = Trust()
    runner: RunBy = "python"
