"""Signatures of both forms: what the caller and the policies ask for is checked first, in Python and in C."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import exportkit
from exportkit.errors import (
    DigestMismatchError,
    PolicyError,
    RevokedError,
    SignatureError,
    SignatureMissingError,
    UsageError,
)
from exportkit.package.archive import PackageReader
from exportkit.package.revocation import revoke
from exportkit.package.signing import sign_package
from exportkit.runtime.native import library_path
from tests.package.signers import Signer, signer, write_policy
from tests.runtime import c_interface, exportkit_run, tiny, ways

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1-cpu.pt2"

Load = Callable[..., None]  # of a package, keys and, by name, a signature file


def load_in_python(package: Path, *keys: object, signature: Path | None = None) -> None:
    args, kwargs = tiny.example()
    with exportkit.load(package, public_key=list(keys) or None, signature=signature) as model:
        assert model(*args, **kwargs)["regions"].mean.isfinite().all()


def load_in_c(package: Path, *keys: object, signature: Path | None = None) -> None:
    exportkit_run.require_built()
    given: dict[str, object] = {}
    if keys:
        given = {"public_keys": (ctypes.c_char_p * len(keys))(*map(encoded, keys)), "public_key_count": len(keys)}
    if signature is not None:
        given["signature"] = encoded(signature)
    with ways.called(c_interface.Library(str(library_path())).open, package, **given) as model:
        model.replay(0)


def encoded(text: object) -> bytes:
    return str(text).encode()


@pytest.fixture(params=[load_in_python, load_in_c], ids=["Python", "C"])
def load(request: pytest.FixtureRequest) -> Load:
    return request.param


@pytest.fixture
def package(tiny_package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_package, tmp_path / "signed.pt2"))


@pytest.fixture
def release(tmp_path: Path) -> Signer:
    return signer(tmp_path)


@pytest.fixture(params=[None, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> Signer:
    """Of every kind."""
    return signer(tmp_path, "any", curve=request.param and request.param())


@pytest.fixture
def curve(tmp_path: Path) -> Signer:
    """Of a bundle of model signing."""
    return signer(tmp_path, "curve", curve=ec.SECP384R1())


@pytest.fixture
def stranger(tmp_path: Path) -> Signer:
    return signer(tmp_path, "stranger")


def bundle_of(package: Path) -> Path:
    return package.with_name(f"{package.name}.sigstore.json")


def test_a_signature_by_the_key_that_was_asked_for_is_taken(load, package, key, stranger):
    with pytest.raises(SignatureMissingError, match="as the caller requires"):
        load(package, key.public)
    sign_package(package, key.key)
    load(package, stranger.public, key.public)
    with pytest.raises(SignatureMissingError):
        load(package, stranger.public)
    assert str(package) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_keys_are_given_as_text_and_signatures_lie_anywhere(load, package, release, curve, tmp_path):
    for key in (release, curve):
        sign_package(package, key.key)
        load(package, key.public.read_text())
    moved = Path(f"{package}.sig").rename(tmp_path / "elsewhere")
    load(package, release.public, signature=moved)
    with pytest.raises(UsageError, match="without a public key"):
        load(package, signature=moved)


def test_exportkit_run_asks_for_a_signature_by_a_key(package, release, stranger, tmp_path):
    sign_package(package, release.key)
    moved = Path(f"{package}.sig").rename(tmp_path / "elsewhere")
    keys = ["--public-key", stranger.public, "--public-key", release.public]
    assert exportkit_run.load(package, *keys, "--signature", moved)["ok"] is True
    with pytest.raises(SignatureMissingError):
        exportkit_run.load(package, *keys)


def test_no_key_at_all_is_no_way_to_ask_for_one(package):
    with pytest.raises(UsageError, match="the list of public keys is empty"):
        exportkit.load(package, public_key=[])


def test_a_revoked_key_and_a_revoked_package_are_refused(load, package, release, curve, tmp_path, monkeypatch):
    revoked = tmp_path / "revoked.json"
    lists = [{"list": "revoked.json", "minimum_sequence": 1}]
    policy = write_policy(tmp_path / "policy.json", release.public, curve.public, revocations=lists)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    with pytest.raises(PolicyError, match="which does not exist"):
        load(package)
    revoke(revoked, {release.public_key.id: "stolen"}, {})
    sign_package(package, release.key)
    with pytest.raises(RevokedError, match=r"by key [0-9a-f]{64}, which is revoked by .*\(stolen\)"):
        load(package)
    sign_package(package, curve.key)
    load(package)
    with PackageReader(package) as reader:
        revoke(revoked, {}, {reader.manifest_sha256: ""})
    with pytest.raises(RevokedError, match=r"signed\.pt2 is revoked by"):
        load(package)


def test_the_signature_is_over_every_record_and_checked_before_any_is_read(load, package, release, stranger):
    sign_package(package, release.key)
    with PackageReader(package) as reader:
        at = reader.data_offset(next(name for name in reader.names if name.endswith(".so"))) + 5000
    content = bytearray(package.read_bytes())
    content[at] ^= 1
    package.write_bytes(content)
    with pytest.raises(SignatureMissingError):
        load(package, stranger.public)
    with pytest.raises(DigestMismatchError):
        load(package, release.public)


def test_another_package_under_the_name_of_a_signed_one_is_refused(load, package, release):
    sign_package(package, release.key)
    package.write_bytes(GOLDEN.read_bytes())
    with pytest.raises(SignatureError, match="signs another package"):
        load(package, release.public)


def test_a_bundle_of_another_file_or_with_other_bits_stops_before_anything_runs(load, package, curve, tmp_path):
    sign_package(package, curve.key)
    document = json.loads(bundle_of(package).read_text())
    (signature,) = document["dsseEnvelope"]["signatures"]
    raw = base64.b64decode(signature["sig"])
    signature["sig"] = base64.b64encode(raw[:-1] + bytes([raw[-1] ^ 1])).decode()
    right = bundle_of(package).read_text()
    bundle_of(package).write_text(json.dumps(document))
    with pytest.raises(SignatureError, match="is not valid"):
        load(package, curve.public)
    bundle_of(package).write_text(right)
    package.write_bytes(GOLDEN.read_bytes())
    with pytest.raises(SignatureError, match="signs another file"):
        load(package, curve.public)
    assert not (tmp_path / "exportkit-cache").exists()


def test_a_policy_of_both_kinds_of_keys_takes_either_signature(load, package, release, curve, tmp_path, monkeypatch):
    policy = tmp_path / "policy.json"
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    write_policy(policy, curve.public)
    with pytest.raises(SignatureMissingError, match=r"as the policy .*policy\.json requires: there is no .*sigstore"):
        load(package)
    sign_package(package, curve.key)
    load(package)
    write_policy(policy, curve.public, release.public)  # the new key comes
    load(package)
    sign_package(package, release.key)
    bundle_of(package).unlink()
    load(package)
    write_policy(policy, curve.public)  # and is withdrawn
    with pytest.raises(SignatureMissingError):
        load(package)
    write_policy(policy, release.public)  # or the old one goes
    load(package)
    policy.chmod(0o666)
    with pytest.raises(PolicyError):
        load(package)
