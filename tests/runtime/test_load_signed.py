"""exportkit.load and signatures: what a caller asks for is checked before the package is looked into."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import exportkit
from exportkit.errors import DigestMismatchError, SignatureError, SignatureMissingError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.signing import sign_package
from tests.package.signers import Signer, signer
from tests.runtime import tiny


@pytest.fixture
def release(tmp_path: Path) -> Signer:
    return signer(tmp_path)


@pytest.fixture
def signed(tiny_package: Path, tmp_path: Path, release: Signer) -> Path:
    path = Path(shutil.copy(tiny_package, tmp_path / "signed.pt2"))
    sign_package(path, release.key)
    return path


def test_a_package_signed_by_the_key_runs(signed, release, tmp_path):
    args, kwargs = tiny.example()
    stranger = signer(tmp_path, "stranger")
    for key in (release.public, str(release.public), release.public.read_text(), [stranger.public, release.public]):
        with exportkit.load(signed, public_key=key) as model:
            assert model(*args, **kwargs)["regions"].mean.isfinite().all()


def test_a_package_of_somebody_else_is_refused_and_let_go(signed, tmp_path):
    with pytest.raises(SignatureMissingError, match="as the caller requires"):
        exportkit.load(signed, public_key=signer(tmp_path, "stranger").public)
    assert str(signed) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_the_signature_is_over_every_record_and_checked_before_any_is_read(signed, release, tmp_path):
    with PackageReader(signed) as reader:
        at = reader.data_offset(next(name for name in reader.names if name.endswith(".so"))) + 5000
    with open(signed, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SignatureMissingError):
        exportkit.load(signed, public_key=signer(tmp_path, "stranger").public)
    with pytest.raises(DigestMismatchError):
        exportkit.load(signed, public_key=release.public)


def test_no_key_at_all_is_no_way_to_ask_for_one(signed):
    with pytest.raises(UsageError, match="the list of public keys is empty"):
        exportkit.load(signed, public_key=[])


def test_a_key_on_an_elliptic_curve_checks_a_bundle(signed, tmp_path):
    curve = signer(tmp_path, "curve", curve=ec.SECP256R1())
    with pytest.raises(SignatureMissingError):
        exportkit.load(signed, public_key=curve.public)
    sign_package(signed, curve.key)
    exportkit.load(signed, public_key=curve.public).close()


def test_a_signature_of_another_name_is_given(signed, release, tmp_path):
    elsewhere = Path(f"{signed}.sig").rename(tmp_path / "elsewhere")
    exportkit.load(signed, public_key=release.public, signature=elsewhere).close()
    with pytest.raises(UsageError, match="without a public key"):
        exportkit.load(signed, signature=elsewhere)


def test_another_package_under_the_name_of_a_signed_one_is_refused(signed, release, tiny_files):
    tiny.write(signed, tiny_files)
    with pytest.raises(SignatureError, match="signs another package"):
        exportkit.load(signed, public_key=release.public)
