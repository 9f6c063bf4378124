"""Reads what `exportkit verify --json` printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from exportkit.errors import UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest
from exportkit.report.untrusted import LeftOut

_MAX_BYTES = 64 << 20

Number = float | str | None  # infinities and NaN are text


class _Error(msgspec.Struct, frozen=True):
    rms: Number
    rms_allowed: Number
    greatest: Number
    greatest_allowed: Number


class _Output(msgspec.Struct, frozen=True):
    name: str
    compared: int
    mismatched: int
    max_abs: Number = None
    error: _Error | None = None
    note: str | None = None
    call: int | None = None  # the number of the call in its sequence; None for state


class _Verdict(msgspec.Struct, frozen=True):
    kind: str
    message: str
    exit_code: int
    outputs: list[_Output] = []


class _Check(msgspec.Struct, frozen=True):
    against: str
    label: str
    verdict: _Verdict
    target: str | None = None
    seconds: float | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str
    device: str | None = None
    left_out: str | None = None


class _Verification(msgspec.Struct, frozen=True):
    artifact: str
    exit_code: int
    checks: list[_Check]
    targets: list[_Target] = []
    torch: str | None = None
    onnxruntime: str | None = None
    manifest_sha256: str | None = None


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(_Verification)


def read_verification(path: Path, reader: PackageReader, left_out: LeftOut) -> dict[str, Any]:
    """Reads a verification for the page.

    Args:
        path: What `exportkit verify --json` printed.
        reader: The open package.
        left_out: Gets notes on what is not shown.

    Raises:
        UsageError: The file cannot be read, is something else, or is of another package.
    """
    hint = "`exportkit verify ARTIFACT --json > FILE.json` writes one."
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is no verification: it has more than {_MAX_BYTES >> 20} MiB", hint=hint)
        found = _DECODER.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a verification: {error}", hint=hint) from error
    if found.manifest_sha256 != reader.manifest_sha256:
        raise UsageError(
            f"{path} is a verification of another artifact than {reader.path}: the digests of their manifests differ",
            hint="Verify this artifact with `exportkit verify --json`.",
        )
    checks = left_out.first(found.checks, left_out.limits.checks, "checks of the verification")
    return {
        "artifact": found.artifact,
        "ok": found.exit_code == 0,
        "torch": found.torch,
        "onnxruntime": found.onnxruntime,
        "targets": msgspec.to_builtins(found.targets),
        "checks": [_shown(check, reader.manifest) for check in checks],
    }


def _shown(check: _Check, manifest: Manifest) -> dict[str, Any]:
    """Returns a check, whose outputs have the names that the page gives them: such as "decode: scores"."""
    case = re.match(r"case (\d+) ", check.label) if check.against == "cases" else None
    number = int(case[1]) if case else len(manifest.cases)
    calls = manifest.cases[number].calls if number < len(manifest.cases) else ()
    shown: dict[str, Any] = msgspec.to_builtins(check)
    for output in shown["verdict"]["outputs"]:
        place, name = output.pop("call"), re.sub(r"^call \d+: ", "", output["name"])
        known = len(manifest.methods) > 1 and place is not None and 0 <= place < len(calls)
        output["name"] = f"{calls[place].method}: {name}" if known else name
    return shown
