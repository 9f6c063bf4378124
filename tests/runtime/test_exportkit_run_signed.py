"""exportkit-run and signatures of both forms: what the caller and the policies ask for holds without Python."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from exportkit.errors import SignatureError, SignatureMissingError, UsageError
from exportkit.package.archive import PackageReader
from tests.runtime import exportkit_run

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1-cpu.pt2"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The private and public half of a key, as openssl writes them."""
    private, public = (tmp_path_factory.mktemp("keys") / name for name in ("private.pem", "public.pem"))
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


def signature_of(package: Path, private: Path, tmp_path: Path) -> dict[str, object]:
    """Made with openssl from what FORMAT.md says, without a line of the code under test."""
    with PackageReader(package) as reader:
        manifest_sha256 = reader.manifest_sha256
    file_sha256 = hashlib.sha256(package.read_bytes()).hexdigest()
    statement = tmp_path / "statement"
    statement.write_text(
        f"exportkit package signature 1\nmanifest-sha256 {manifest_sha256}\nfile-sha256 {file_sha256}\n"
    )
    command = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(private), "-in", str(statement)]
    signed = subprocess.run(command, capture_output=True, check=True).stdout
    der = subprocess.run(
        ["openssl", "pkey", "-in", private, "-pubout", "-outform", "DER"], capture_output=True, check=True
    ).stdout
    signature = {
        "key_id": hashlib.sha256(der[-32:]).hexdigest(),
        "algorithm": "ed25519",
        "signature": base64.b64encode(signed).decode(),
    }
    return {
        "format_version": 1,
        "manifest_sha256": manifest_sha256,
        "file_sha256": file_sha256,
        "signatures": [signature],
    }


@pytest.fixture
def signed(tiny_package: Path, tmp_path: Path, keys: tuple[Path, Path]) -> tuple[Path, dict[str, object]]:
    package = tmp_path / "signed.pt2"
    package.write_bytes(tiny_package.read_bytes())
    signature = signature_of(package, keys[0], tmp_path)
    package.with_name("signed.pt2.sig").write_text(json.dumps(signature))
    return package, signature


def test_a_signature_by_the_key_that_was_asked_for_is_taken(signed, keys, tmp_path):
    package, _ = signed
    assert exportkit_run.load(package, "--public-key", keys[1])["ok"] is True
    assert exportkit_run.load(package, "--public-key", keys[1].read_text())["ok"] is True
    link = tmp_path / "link.pt2"
    link.symlink_to(package)
    assert exportkit_run.load(link, "--public-key", keys[1])["ok"] is True
    moved = package.with_name("signed.pt2.sig").rename(tmp_path / "elsewhere")
    assert exportkit_run.load(package, "--public-key", keys[1], "--signature", moved)["ok"] is True
    with pytest.raises(SignatureMissingError, match=r"there is no .*signed\.pt2\.sig"):
        exportkit_run.load(package, "--public-key", keys[1])


def test_a_signature_by_another_key_is_none(signed, tmp_path):
    private, public = tmp_path / "other.pem", tmp_path / "other.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    with pytest.raises(SignatureMissingError, match="has signatures by key "):
        exportkit_run.load(signed[0], "--public-key", public)
    with pytest.raises(UsageError, match="is a private one"):
        exportkit_run.load(signed[0], "--public-key", private)


def with_other_bits(signature: dict[str, str]) -> dict[str, str]:
    text = signature["signature"]
    return signature | {"signature": ("B" if text[0] == "A" else "A") + text[1:]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"manifest_sha256": "0" * 64}, "is the signature of another package"),
        (lambda s: s | {"file_sha256": "0" * 64}, "does not hold"),
        (lambda s: s | {"signatures": [with_other_bits(s["signatures"][0])]}, "does not hold"),
        (lambda s: s | {"signatures": s["signatures"] * 2}, "two signatures by key"),
        (lambda s: s | {"signatures": []}, "no signature"),
        (lambda s: s | {"surprise": 1}, "unknown key"),
        (lambda s: s | {"format_version": 2}, "has format version 2"),
        (lambda s: s | {"signatures": [s["signatures"][0] | {"algorithm": "rsa"}]}, "other than ed25519"),
        (lambda s: s | {"signatures": [s["signatures"][0] | {"signature": "AA=="}]}, "64 bytes"),
        (lambda s: {k: v for k, v in s.items() if k != "file_sha256"}, "without a key"),
    ],
)  # fmt: skip
def test_a_signature_that_does_not_hold_is_refused_before_anything_runs(signed, keys, tmp_path, change, message):
    package, signature = signed
    package.with_name("signed.pt2.sig").write_text(json.dumps(change(signature)))
    with pytest.raises(SignatureError, match=message):
        exportkit_run.load(package, "--public-key", keys[1])
    assert not (tmp_path / "exportkit-cache").exists()


def test_a_policy_asks_whatever_the_caller_says(signed, tiny_package, keys, tmp_path, monkeypatch):
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"version": 1, "require_signature": True, "public_keys": [str(keys[1])]}))
    policy.chmod(0o600)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    assert exportkit_run.load(signed[0])["ok"] is True
    with pytest.raises(SignatureMissingError, match=r"as the policy .*policy\.json asks for"):
        exportkit_run.load(tiny_package)
    policy.chmod(0o666)
    answer = exportkit_run.run(signed[0])
    assert (answer.code, answer.document["error"]["kind"]) == (4, "PolicyError")
    monkeypatch.setenv("EXPORTKIT_POLICY", str(tmp_path / "gone.json"))
    assert exportkit_run.run(signed[0]).document["error"]["kind"] == "PolicyError"


# --- bundles of model signing -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("prime256v1", "sha256"), ("secp384r1", "sha384"), ("secp521r1", "sha512")])
def curve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The private and public half of a key on a curve, as openssl writes them, and the hash that goes with it."""
    name, hash_ = request.param
    private, public = (tmp_path_factory.mktemp("keys") / name for name in ("private.pem", "public.pem"))
    command = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{name}", "-out", private]
    subprocess.run(command, check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public, hash_


def write_bundle(package: Path, key: tuple[Path, Path, str]) -> Path:
    """Made with openssl from what FORMAT.md says, without a line of the code under test."""
    private, public, hash_ = key
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": "files"},
            "resources": [{"name": ".", "algorithm": "sha256", "digest": digest}],
        },
    }
    payload, kind = json.dumps(statement).encode(), b"application/vnd.in-toto+json"
    signed = subprocess.run(
        ["openssl", "dgst", f"-{hash_}", "-sign", private],
        input=b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload),
        capture_output=True,
        check=True,
    ).stdout
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(public.read_bytes()).hexdigest()}},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": kind.decode(),
            "signatures": [{"sig": base64.b64encode(signed).decode()}],
        },
    }
    file = package.with_name(f"{package.name}.sigstore.json")
    file.write_text(json.dumps(bundle))
    return file


def test_a_bundle_by_the_key_that_was_asked_for_is_taken(tiny_package, curve, tmp_path):
    package = tmp_path / "signed.pt2"
    package.write_bytes(tiny_package.read_bytes())
    with pytest.raises(SignatureMissingError, match=r"there is no .*signed\.pt2\.sigstore\.json"):
        exportkit_run.load(package, "--public-key", curve[1])
    bundle = write_bundle(package, curve)
    assert exportkit_run.load(package, "--public-key", curve[1])["ok"] is True
    moved = bundle.rename(tmp_path / "elsewhere")
    assert exportkit_run.load(package, "--public-key", curve[1].read_text(), "--signature", moved)["ok"] is True


def test_a_bundle_of_another_file_or_with_other_bits_stops_before_anything_runs(tiny_package, curve, tmp_path):
    package = tmp_path / "signed.pt2"
    package.write_bytes(tiny_package.read_bytes())
    bundle = write_bundle(package, curve)
    document = json.loads(bundle.read_text())
    (signature,) = document["dsseEnvelope"]["signatures"]
    signature["sig"] = base64.b64encode(base64.b64decode(signature["sig"])[:-1] + b"\0").decode()
    bundle.write_text(json.dumps(document))
    with pytest.raises(SignatureError, match="does not hold"):
        exportkit_run.load(package, "--public-key", curve[1])
    write_bundle(package, curve)
    package.write_bytes(GOLDEN.read_bytes())
    with pytest.raises(SignatureError, match="is the signature of another file"):
        exportkit_run.load(package, "--public-key", curve[1])
    assert not (tmp_path / "exportkit-cache").exists()


def test_the_bundle_of_the_model_signing_tool_is_taken():
    key = GOLDEN.with_name("model-signing-1.1.1.pem")
    assert exportkit_run.load(GOLDEN, "--public-key", key)["ok"] is True


def test_a_policy_of_both_kinds_of_keys_takes_either_signature_while_one_replaces_the_other(
    tiny_package, keys, curve, tmp_path, monkeypatch
):
    package, policy = tmp_path / "signed.pt2", tmp_path / "policy.json"
    package.write_bytes(tiny_package.read_bytes())

    def demand(*public: Path) -> None:
        policy.write_text(json.dumps({"version": 1, "require_signature": True, "public_keys": list(map(str, public))}))
        policy.chmod(0o600)

    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    demand(curve[1])
    with pytest.raises(SignatureMissingError, match=r"as the policy .*policy\.json asks for: there is no .*sigstore"):
        exportkit_run.load(package)
    bundle = write_bundle(package, curve)
    assert exportkit_run.load(package)["ok"] is True
    demand(curve[1], keys[1])  # the new key comes
    assert exportkit_run.load(package)["ok"] is True
    own = package.with_name("signed.pt2.sig")
    own.write_text(json.dumps(signature_of(package, keys[0], tmp_path)))
    bundle.unlink()
    assert exportkit_run.load(package)["ok"] is True
    demand(curve[1])  # and is withdrawn
    with pytest.raises(SignatureMissingError):
        exportkit_run.load(package)
    demand(keys[1])  # or the old one goes
    assert exportkit_run.load(package)["ok"] is True
