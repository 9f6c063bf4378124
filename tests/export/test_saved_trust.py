"""An ExportedProgram is held against the machine's policies before torch reads, and may unpickle, any of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exportkit.errors import DigestMismatchError, SignatureMissingError, UsageError
from exportkit.export.artifact import export_program
from exportkit.export.models.program_file import load_program
from exportkit.export.models.resolve import resolve
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.package.signers import signer, write_policy


def test_a_signed_program_is_read_and_run_where_a_policy_asks_for_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, release = Path(shutil.copy(artifact("patches-program"), tmp_path / "program.pt2")), signer(tmp_path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", release.public)))
    with pytest.raises(SignatureMissingError):
        load_program(path)
    assert verify(path, VerifyOptions(against="cases")).exit_code == 3
    sign_package(path, release.key)
    assert load_program(path).programs
    report = verify(path, VerifyOptions(against="cases"))
    assert report.exit_code == 0
    assert report.checks[0].verdict.kind == "signed"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(artifact("patches-program"), tmp_path / "program.pt2"))


def test_a_program_is_read_where_the_key_that_the_caller_names_has_signed_it(path: Path, tmp_path: Path) -> None:
    release, stranger = signer(tmp_path), signer(tmp_path, "stranger")
    keys = [release.public]
    with pytest.raises(SignatureMissingError):
        resolve(str(path), trust=Trust(keys))
    signature = sign_package(path, release.key)
    with pytest.raises(SignatureMissingError):
        resolve(str(path), trust=Trust([stranger.public]))
    assert resolve(str(path), trust=Trust([stranger.public, *keys])).programs
    moved = signature.rename(tmp_path / "elsewhere.sig")
    with pytest.raises(SignatureMissingError):
        resolve(str(path), trust=Trust(keys))
    assert resolve(str(path), trust=Trust(keys, moved)).programs
    with pytest.raises(UsageError, match="without a public key"):
        resolve(str(path), trust=Trust(signature=moved))


def test_cases_of_another_package_do_not_take_the_place_of_the_signed_ones(path: Path, tmp_path: Path) -> None:
    release = signer(tmp_path)
    sign_package(path, release.key)
    resolved = resolve(str(path), trust=Trust([release.public]))
    with PackageReader(path) as reader:
        records = {name: reader.read(name) for name in reader.names}
        first, second = (case.record for case in reader.manifest.cases[:2])
        records[first], records[second] = records[second], records[first]
        write_package(path, reader.manifest, records)
    with pytest.raises(DigestMismatchError, match="another package"):
        export_program(resolved, tmp_path / "out.pt2")
    assert not (tmp_path / "out.pt2").exists()
