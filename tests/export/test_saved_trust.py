"""An ExportedProgram is held against the machine's policies before torch reads, and may unpickle, any of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exportkit.errors import SignatureMissingError
from exportkit.export.saved import load_program
from exportkit.package import policy
from exportkit.package.signing import sign_package
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.package.signers import signer


def test_a_signed_program_is_read_and_run_where_a_policy_asks_for_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, release = Path(shutil.copy(artifact("patches-program"), tmp_path / "program.pt2")), signer(tmp_path)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"version": 1, "require_signature": True, "public_keys": [release.public.name]}))
    monkeypatch.setattr(policy, "SYSTEM_POLICY", tmp_path / "etc" / "policy.json")
    monkeypatch.setenv("EXPORTKIT_POLICY", str(file))
    with pytest.raises(SignatureMissingError):
        load_program(path)
    assert verify(path, VerifyOptions(against="cases")).exit_code == 3
    sign_package(path, release.key)
    assert load_program(path).program is not None
    report = verify(path, VerifyOptions(against="cases"))
    assert report.exit_code == 0
    assert report.checks[0].verdict.kind == "signed"
