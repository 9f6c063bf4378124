"""exportkit-run and signatures of both forms: what the caller and the policies ask for holds without Python."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from exportkit.errors import SignatureError, SignatureMissingError
from exportkit.package.signing import sign_package
from tests.package.signers import Signer, signer, write_policy
from tests.runtime import exportkit_run

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1-cpu.pt2"


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


def bundle_of(package: Path) -> Path:
    return package.with_name(f"{package.name}.sigstore.json")


def test_a_signature_by_the_key_that_was_asked_for_is_taken(package, key, tmp_path):
    with pytest.raises(SignatureMissingError):
        exportkit_run.load(package, "--public-key", key.public)
    sign_package(package, key.key)
    stranger = signer(tmp_path, "stranger")
    assert exportkit_run.load(package, "--public-key", stranger.public, "--public-key", key.public)["ok"] is True


def test_keys_are_given_as_text_and_signatures_lie_anywhere(package, release, curve, tmp_path):
    for key in (release, curve):
        sign_package(package, key.key)
        assert exportkit_run.load(package, "--public-key", key.public.read_text())["ok"] is True
    moved = Path(f"{package}.sig").rename(tmp_path / "elsewhere")
    assert exportkit_run.load(package, "--public-key", release.public, "--signature", moved)["ok"] is True
    with pytest.raises(SignatureMissingError):
        exportkit_run.load(package, "--public-key", signer(tmp_path, "stranger").public)


def test_a_bundle_of_another_file_or_with_other_bits_stops_before_anything_runs(package, curve, tmp_path):
    sign_package(package, curve.key)
    document = json.loads(bundle_of(package).read_text())
    (signature,) = document["dsseEnvelope"]["signatures"]
    raw = base64.b64decode(signature["sig"])
    signature["sig"] = base64.b64encode(raw[:-1] + bytes([raw[-1] ^ 1])).decode()
    right = bundle_of(package).read_text()
    bundle_of(package).write_text(json.dumps(document))
    with pytest.raises(SignatureError, match="is not valid"):
        exportkit_run.load(package, "--public-key", curve.public)
    bundle_of(package).write_text(right)
    package.write_bytes(GOLDEN.read_bytes())
    with pytest.raises(SignatureError, match="signs another file"):
        exportkit_run.load(package, "--public-key", curve.public)
    assert not (tmp_path / "exportkit-cache").exists()


def test_a_policy_of_both_kinds_of_keys_takes_either_signature(package, release, curve, tmp_path, monkeypatch):
    policy = tmp_path / "policy.json"
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    write_policy(policy, curve.public)
    with pytest.raises(SignatureMissingError, match=r"as the policy .*policy\.json requires: there is no .*sigstore"):
        exportkit_run.load(package)
    sign_package(package, curve.key)
    assert exportkit_run.load(package)["ok"] is True
    write_policy(policy, curve.public, release.public)  # the new key comes
    assert exportkit_run.load(package)["ok"] is True
    sign_package(package, release.key)
    bundle_of(package).unlink()
    assert exportkit_run.load(package)["ok"] is True
    write_policy(policy, curve.public)  # and is withdrawn
    with pytest.raises(SignatureMissingError):
        exportkit_run.load(package)
    write_policy(policy, release.public)  # or the old one goes
    assert exportkit_run.load(package)["ok"] is True
    policy.chmod(0o666)
    answer = exportkit_run.run(package)
    assert (answer.code, answer.document["error"]["kind"]) == (4, "PolicyError")
