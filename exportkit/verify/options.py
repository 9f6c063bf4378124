"""The options of a verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Against = Literal["cases", "eager", "both"]


@dataclass(frozen=True)
class VerifyOptions:
    """Selects the comparisons of a verification.

    Attributes:
        against: Compare with recorded cases, the eager model, or both. "both" skips an eager model that cannot be made.
        shapes: The number of sizes to compare with eager.
        rtol: Replaces, together with `atol`, the recorded tolerances of floating outputs.
        atol: See `rtol`.
        device: "auto" for every target that runs here; "cpu", "cuda" or "cuda:1" for the targets of that device.
        target: The name of the only target to run.
        model: MODEL; by default the one that the artifact recorded. If a signature is required, the recorded MODEL is
            not imported, because the signature covers its name but not its source. An unsigned artifact runs its own
            code anyway, so its MODEL is imported.
        weights: The weights file that the model was exported with.
        op_libraries: Operator libraries that the artifact calls but does not contain, or modules that load some.
        seed: The seed of the sizes and inputs for eager.
        timeout: Seconds a call may take. Loading, which imports torch, always gets at least 600.
        max_input_bytes: The limit on the inputs of one call. Larger sizes are skipped and reported.
        public_keys: PEM files. One of these keys must have signed the artifact. Each policy adds its own requirement.
        signature: The signature file, if it is not beside the artifact.
    """

    against: Against = "both"
    shapes: int = 8
    rtol: float | None = None
    atol: float | None = None
    device: str = "auto"
    target: str | None = None
    model: str | None = None
    weights: Path | None = None
    op_libraries: Sequence[Path | str] = ()
    seed: int = 0
    timeout: float = 600.0
    max_input_bytes: int = 32 * 10**6
    public_keys: Sequence[Path] = ()
    signature: Path | None = None
