"""Bundles of OpenSSF model signing: ours satisfy its own tool, its own satisfy us, and nothing else does."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from exportkit.errors import SignatureError, SignatureMissingError
from exportkit.package.archive import write_package
from exportkit.package.keys import read_public_key
from exportkit.package.openssf import pre_authentication
from exportkit.package.signing import sign_package
from tests.package import samples
from tests.package.signers import Change, Signer, edit, package, set_at, signer
from tests.package.test_signature import MAX_BYTES, signed_by

TOOL = shutil.which("model_signing")
needs_tool = pytest.mark.skipif(TOOL is None, reason="no model_signing: pip install model-signing==1.1.1 pyOpenSSL")

CURVES = [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()]
HASHES = [hashes.SHA1(), hashes.SHA256(), hashes.SHA384(), hashes.SHA512()]


@pytest.fixture
def release(tmp_path: Path) -> Signer:
    return signer(tmp_path, "release", curve=ec.SECP256R1())


@pytest.fixture
def signed(tmp_path: Path, release: Signer) -> Path:
    path = package(tmp_path)
    assert sign_package(path, release.key) == beside(path)
    return path


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sigstore.json")


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    assert TOOL
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, check=False)


def signed_again(key: Signer, change: Change) -> Change:
    """Changes the statement of a bundle and signs it by the same key: for what only the statement says."""

    def changed(document: dict[str, Any]) -> None:
        envelope = document["dsseEnvelope"]
        statement = json.loads(base64.b64decode(envelope["payload"]))
        change(statement)
        payload = json.dumps(statement).encode()
        signature = base64.b64encode(key.key.sign(pre_authentication(payload))).decode()
        envelope |= {"payload": base64.b64encode(payload).decode(), "signatures": [{"sig": signature, "keyid": ""}]}

    return changed


@needs_tool
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_the_model_signing_tool_takes_our_bundles_and_we_take_its(tmp_path: Path, curve: Any) -> None:
    key, path = signer(tmp_path, "release", curve=curve), package(tmp_path)
    sign_package(path, key.key)
    arguments = ("verify", "key", path, "--public_key", key.public, "--signature", beside(path))
    taken = tool(*arguments)
    assert taken.returncode == 0, taken.stdout + taken.stderr
    path.write_bytes(path.read_bytes() + b"\0")
    assert tool(*arguments).returncode != 0
    package(tmp_path)  # as it was
    beside(path).unlink()
    made = tool("sign", "key", path, "--private_key", key.private, "--signature", beside(path))
    assert made.returncode == 0, made.stdout + made.stderr
    assert signed_by(path, key.public)
    package(tmp_path, version="2")
    with pytest.raises(SignatureError, match="signs another file"):
        signed_by(path, key.public)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_at("mediaType", "application/json"), "mediaType"),
        (set_at("verificationMaterial", {}), "publicKey"),
        (set_at("verificationMaterial", {"certificate": {}}), "publicKey"),
        (set_at("dsseEnvelope", "payloadType", "text/plain"), "payloadType"),
        (set_at("dsseEnvelope", "signatures", []), "signatures"),
        (set_at("dsseEnvelope", "signatures", 0, "sig", base64.b64encode(bytes(70)).decode()), "is not valid"),
        (set_at("dsseEnvelope", "signatures", 0, "sig", "no base64!"), "invalid base64"),
        (set_at("dsseEnvelope", "signatures", 0, "sig", "AAA\u00e9"), "invalid base64"),  # found by fuzzing
        (set_at("dsseEnvelope", "signatures", 0, "sig", ""), "is not valid"),
        (set_at("dsseEnvelope", "signatures", 0, "sig", "AB=="), "invalid base64"),  # four bits more than the byte
        (set_at("dsseEnvelope", "signatures", 0, "sig", "QUJD\n"), "invalid base64"),
        (set_at("dsseEnvelope", "payload", base64.b64encode(b"{}").decode()), "is not valid"),
        (set_at("dsseEnvelope", "payload", ""), "is not valid"),
        (set_at("dsseEnvelope", "payload", None), "payload"),
        (set_at("verificationMaterial", "publicKey", "hint", "\x1b[2J"), "hint"),  # is printed
        (set_at("verificationMaterial", "tlogEntries", ["\ud800"]), "not a model signing bundle"),
        (lambda document: document["dsseEnvelope"]["signatures"].append({"sig": "AA=="}), "signatures"),
    ],
)
def test_a_bundle_that_was_tampered_with(signed: Path, release: Signer, change: Change, named: str) -> None:
    edit(beside(signed), change)
    with pytest.raises(SignatureError, match=named):
        signed_by(signed, release.public)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_at("_type", "https://in-toto.io/Statement/v0.1"), "_type"),
        (set_at("predicateType", "https://slsa.dev/provenance/v1"), "predicateType"),
        (set_at("predicate", "serialization", "method", "shards"), "method"),
        (set_at("predicate", "resources", []), "resources"),
        (set_at("predicate", "resources", 0, "name", "model.pt2"), "name"),
        (set_at("predicate", "resources", 0, "algorithm", "blake2"), "algorithm"),
        (set_at("predicate", "resources", 0, "digest", "of nothing"), "digest"),
        (lambda statement: statement["predicate"]["resources"].append({}), "resources"),
        (lambda statement: statement.pop("_type"), "_type"),
        (set_at("predicate", "resources", 0, "digest", "0" * 64), "signs another file"),
    ],
)
def test_a_statement_that_the_key_signed_about_something_else(
    signed: Path, release: Signer, change: Change, named: str
) -> None:
    edit(beside(signed), signed_again(release, change))
    with pytest.raises(SignatureError, match=named):
        signed_by(signed, release.public)


NO_BUNDLES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda bundle: b"",
    "a list": lambda bundle: b"[" + bundle + b"]",
    "a byte order mark": lambda bundle: b"\xef\xbb\xbf" + bundle,
    "half of it": lambda bundle: bundle[: len(bundle) // 2],
    "brackets": lambda bundle: b"[" * 1000,
    "a key twice": lambda bundle: bundle.replace(b"{", b'{"x": 1, "x": 1,', 1),
    "the same key twice within": lambda bundle: bundle.replace(b'"hint"', b'"hint": "", "hint"'),
    "too deep": lambda bundle: bundle.replace(b"[]", b"[" * 16 + b"]" * 16),
    "a NUL": lambda bundle: bundle + b"\0",
}


@pytest.mark.parametrize("change", NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_what_is_no_bundle_is_refused(signed: Path, release: Signer, change: Callable[[bytes], bytes]) -> None:
    before = beside(signed).read_bytes()
    beside(signed).write_bytes(change(before))
    assert beside(signed).read_bytes() != before
    with pytest.raises(SignatureError, match="not a model signing bundle"):
        signed_by(signed, release.public)


def test_a_file_that_is_too_large_for_a_bundle_is_not_looked_at(signed: Path, release: Signer) -> None:
    content = beside(signed).read_bytes()
    beside(signed).write_bytes(content + b" " * (MAX_BYTES - len(content)))
    assert signed_by(signed, release.public)
    beside(signed).write_bytes(content + b" " * (MAX_BYTES - len(content) + 1))
    with pytest.raises(SignatureError, match=f"more than {MAX_BYTES} bytes"):
        signed_by(signed, release.public)


def test_what_a_bundle_says_beside_what_is_signed_changes_nothing(signed: Path, release: Signer) -> None:
    content = beside(signed).read_bytes()
    for more in (b"[1e999]", b'[{"deep": [[[]]]}]', b"null", b'"\\ud83d\\ude00 \\u0000"'):
        beside(signed).write_bytes(content.replace(b"[]", more))
        assert beside(signed).read_bytes() != content
        assert signed_by(signed, release.public)


def test_the_file_is_read_only_for_a_signature_that_holds(tmp_path: Path, release: Signer) -> None:
    path = tmp_path / "model.pt2"
    write_package(path, samples.manifest(), {**samples.RECORDS, "data/large": bytes(8 << 20)})
    document = json.loads(sign_package(path, release.key).read_bytes())

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    beside(path).write_text(json.dumps(document | {"mediaType": "application/json"}))
    before = bytes_read()
    with pytest.raises(SignatureError, match="mediaType"):
        signed_by(path, release.public)
    assert bytes_read() - before < 1 << 20
    beside(path).write_text(json.dumps(document))
    signed_by(path, release.public)
    assert bytes_read() - before > 8 << 20  # the control


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
@pytest.mark.parametrize("hash_", HASHES, ids=lambda hash_: hash_.name)
def test_the_curve_says_which_hash_is_signed(tmp_path: Path, curve: Any, hash_: Any) -> None:
    key = signer(tmp_path, "release", curve=curve)
    path = package(tmp_path)
    sign_package(path, key.key)
    payload = base64.b64decode(json.loads(beside(path).read_bytes())["dsseEnvelope"]["payload"])
    signature = base64.b64encode(key.key._key.sign(pre_authentication(payload), ec.ECDSA(hash_))).decode()
    edit(beside(path), set_at("dsseEnvelope", "signatures", 0, "sig", signature))
    if hash_.name == {256: "sha256", 384: "sha384", 521: "sha512"}[curve.key_size]:
        assert signed_by(path, key.public)
    else:
        with pytest.raises(SignatureError, match="is not valid"):
            signed_by(path, key.public)


@pytest.mark.parametrize(
    "form", ["-conv_form compressed", "-conv_form hybrid", "-param_enc explicit", "one line", "words around it"]
)
@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_a_key_has_one_id_however_it_is_written(tmp_path: Path, curve: Any, form: str) -> None:
    key = signer(tmp_path, "release", curve=curve)
    other, text = tmp_path / "other.pem", key.public.read_text()
    if form == "one line":
        begin, *body, end = text.splitlines()
        other.write_text("\n".join((begin, "".join(body), end)))
    elif form == "words around it":
        other.write_text(f"my key\r\n{text}and more")
    else:
        command = ["openssl", "ec", "-pubin", "-in", key.public, "-pubout", "-out", other, *form.split()]
        subprocess.run(command, check=True, capture_output=True)
    assert other.read_bytes() != key.public.read_bytes()
    assert read_public_key(other).id == key.public_key.id
    path = package(tmp_path)
    sign_package(path, key.key)
    assert signed_by(path, other) == [str(other)]


def test_each_kind_of_key_is_held_against_the_file_of_its_own_form(
    signed: Path, release: Signer, tmp_path: Path
) -> None:
    ours = signer(tmp_path, "ours")
    with pytest.raises(SignatureMissingError, match=r"there is no .*model\.pt2\.sig"):
        signed_by(signed, ours.public)
    both = (ours.public, release.public)
    assert signed_by(signed, *both) == [str(release.public)]
    assert signed_by(signed, *both, signature=beside(signed)) == [str(release.public)]
    own = sign_package(signed, ours.key)
    assert signed_by(signed, *both) == [str(ours.public)]
    assert signed_by(signed, *both, signature=own) == [str(ours.public)]
    for file, key in ((own, release), (beside(signed), ours)):
        with pytest.raises(SignatureError):
            signed_by(signed, key.public, signature=file)
    beside(signed).unlink()
    with pytest.raises(SignatureMissingError, match=r"there is no .*model\.pt2\.sigstore\.json"):
        signed_by(signed, release.public)
