"""What a verification is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Against = Literal["cases", "eager", "both"]


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify against, and how strictly.

    Attributes:
        against: Recorded cases, the eager model, or both; with "both", an eager model that cannot be made is skipped.
        shapes: How many sizes to compare with eager at.
        rtol: With `atol`, replaces the recorded tolerances of floating outputs.
        atol: See `rtol`.
        device: "auto" for every target that runs here; "cpu", "cuda" or "cuda:1" for those of that device.
        target: The only one to run, by its name.
        model: MODEL, where it is no longer what the artifact recorded. Where a signature is demanded, what the artifact
            recorded is not imported: the signature covers the name, and not the source of that name. Elsewhere it is:
            an artifact that nobody signed runs code of its own anyway.
        weights: Of the eager model, where it was exported with a weights file.
        op_libraries: Operator libraries that an artifact without libraries needs.
        seed: Of the sizes and the inputs drawn for eager.
        timeout: Seconds a call may take. The first call, which imports torch and loads, gets 600 at least.
        max_input_bytes: Of one call's inputs; sizes beyond it are left out, and named.
        public_keys: PEM files, of which any must have signed the artifact; what a policy asks for comes on top.
        signature: The signature file, where it is not beside the artifact under its name.
    """

    against: Against = "both"
    shapes: int = 8
    rtol: float | None = None
    atol: float | None = None
    device: str = "auto"
    target: str | None = None
    model: str | None = None
    weights: Path | None = None
    op_libraries: Sequence[Path] = ()
    seed: int = 0
    timeout: float = 600.0
    max_input_bytes: int = 32 * 10**6
    public_keys: Sequence[Path] = ()
    signature: Path | None = None
