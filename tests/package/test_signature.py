"""Signature files: one reading each, and nothing but the package and the key that were meant satisfies them."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exportkit.errors import PackageError, SignatureError, SignatureMissingError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.keys import read_private_key, read_public_key
from exportkit.package.signature import Signatures, read_signatures
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand
from tests.cpp_reader import program
from tests.package.c_library import build
from tests.package.signers import Change, Signer, edit, no_password, package, set_at, signer, written
from tests.subprocesses import output_of, run_interpreter

MAX_BYTES = 64 << 10


@pytest.fixture
def signed(tmp_path: Path, release: Signer) -> Path:
    """A package with a signature by `release` beside it."""
    path = package(tmp_path)
    sign_package(path, release.key)
    return path


def signed_by(path: Path, *keys: Path, **options: Any) -> list[str]:
    """Where the keys come from that have signed."""
    with PackageReader(path, demand=demand(keys, **options)) as reader:
        return [key.source for key in reader.signers]


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def said(path: Path) -> Signatures:
    signatures = read_signatures(path)
    assert signatures is not None
    return signatures


# --- what holds -------------------------------------------------------------------------------------------------------


def test_a_package_is_trusted_by_the_key_that_signed_it(signed: Path, release: Signer) -> None:
    assert signed_by(signed, release.public) == [str(release.public)]
    with PackageReader(signed, demand=demand(release.public.read_text())) as reader:
        (key,) = reader.signers
    assert (key.id, key.source) == (release.key.public.id, "text")


def test_nobody_asks_and_nothing_is_looked_at(signed: Path) -> None:
    beside(signed).write_bytes(b"\xff no signature file")
    with PackageReader(signed, demand=demand()) as reader:
        assert reader.signers == ()


def test_signing_leaves_the_package_as_it_was_and_the_same_key_signs_the_same_bytes(
    tmp_path: Path, release: Signer
) -> None:
    path = package(tmp_path)
    before = path.read_bytes()
    first = sign_package(path, release.key).read_bytes()
    assert path.read_bytes() == before
    assert sign_package(path, release.key).read_bytes() == first


def test_several_signers_share_a_file_and_any_wanted_key_will_do(signed: Path, release: Signer, tmp_path: Path) -> None:
    build, stranger = signer(tmp_path, "build"), signer(tmp_path, "stranger")
    sign_package(signed, build.key)
    sign_package(signed, release.key)  # again: it is replaced, not repeated
    assert len(said(beside(signed)).signatures) == 2
    for keys in ([release], [build], [stranger, build], [build, release]):
        assert signed_by(signed, *(key.public for key in keys))
    with pytest.raises(SignatureMissingError) as caught:
        signed_by(signed, stranger.public)
    for key in (release, build, stranger):
        assert key.public_key.id in caught.value.message


def test_signatures_of_an_earlier_build_do_not_stay(signed: Path, release: Signer, tmp_path: Path) -> None:
    package(tmp_path, version="2")
    build = signer(tmp_path, "build")
    sign_package(signed, build.key)
    (only,) = said(beside(signed)).signatures
    assert only.key_id == build.public_key.id


def test_links_to_a_package_have_its_signature_or_their_own(signed: Path, release: Signer, tmp_path: Path) -> None:
    current = tmp_path / "deployed" / "current.pt2"
    current.parent.mkdir()
    current.symlink_to(signed)
    assert signed_by(current, release.public)
    beside(current).write_bytes(b"{}")  # the link's own comes first
    with pytest.raises(SignatureError):
        signed_by(current, release.public)
    beside(current).unlink()
    beside(signed).rename(tmp_path / "blob")
    beside(current).symlink_to(tmp_path / "blob")
    assert signed_by(current, release.public)


# --- what does not ----------------------------------------------------------------------------------------------------


def test_a_package_that_is_not_signed_names_the_keys_that_were_wanted(tmp_path: Path, release: Signer) -> None:
    with pytest.raises(SignatureMissingError, match=rf"{release.public_key.id} \(.*release\.pem\)") as caught:
        signed_by(package(tmp_path), release.public)
    assert caught.value.exit_code == 3
    assert "exportkit sign" in (caught.value.hint or "")


def in_first(key: str, value: object) -> Change:
    return set_at("signatures", 0, key, value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_at("file_sha256", "0" * 64), "is not valid"),
        (in_first("signature", base64.b64encode(bytes(64)).decode()), "is not valid"),
        (set_at("manifest_sha256", "0" * 64), "signs another package"),
        (set_at("format_version", 2), "format version 2; this exportkit reads 1"),
        (set_at("format_version", "1"), "format_version"),
        (set_at("format_version", True), "format_version"),
        (set_at("surprise", 1), "surprise"),
        (in_first("surprise", 1), "surprise"),
        (set_at("signatures", []), "at least one signature"),
        (set_at("signatures", None), "signatures"),
        (lambda d: d.pop("file_sha256"), "object lacks the key"),
        (lambda d: d["signatures"].append(d["signatures"][0]), "two signatures by key"),
        (set_at("manifest_sha256", "A" * 64), "manifest_sha256"),
        (in_first("key_id", "0" * 63), "key_id"),
        (in_first("algorithm", "none"), "algorithm"),
        (in_first("signature", ""), "signature"),
        (in_first("signature", "A" * 86), "signature"),
        (in_first("signature", "A" * 85 + "B=="), "signature"),  # bits that no byte has
        (in_first("signature", "A" * 42 + "\n" + "A" * 43 + "=="), "signature"),
        (in_first("signature", "A" * 85 + "-=="), "signature"),
    ],
)
def test_a_signature_file_that_was_tampered_with(signed: Path, release: Signer, change: Change, named: str) -> None:
    edit(beside(signed), change)
    with pytest.raises(SignatureError, match=named):
        signed_by(signed, release.public)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format_version": 1, "format_version": 1}',
        b'{"format_version": NaN}',
        b"[" * 10_000,
        b'{"format_version": ' + b"9" * 10_000 + b"}",
        b" " * (MAX_BYTES + 1),
    ],
)
def test_what_is_no_signature_file_is_refused(signed: Path, release: Signer, content: bytes) -> None:
    beside(signed).write_bytes(content)
    with pytest.raises(SignatureError, match=r"model\.pt2\.sig"):
        signed_by(signed, release.public)


def test_what_is_no_file_is_refused(signed: Path, release: Signer) -> None:
    for make in (os.mkfifo, os.mkdir):
        beside(signed).unlink()
        make(beside(signed))
        with pytest.raises(SignatureError, match="not a plain file"):
            signed_by(signed, release.public)


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_byte_of_a_signature_file_matters_and_can_be_changed(
    signed: Path, release: Signer, data: st.DataObject
) -> None:
    """A changed file is refused, or says the same: JSON has more than one spelling, the statement has not."""
    content = beside(signed).read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[at] = data.draw(st.integers(0, 255))
    elsewhere = signed.with_name("damaged")
    elsewhere.write_bytes(damaged)
    try:
        decoded = said(elsewhere)
    except SignatureError:
        return
    if decoded != said(beside(signed)):
        with pytest.raises((SignatureError, SignatureMissingError)):
            signed_by(signed, release.public, signature=elsewhere)


def test_a_key_that_signed_does_not_vouch_under_another_ones_id(signed: Path, release: Signer, tmp_path: Path) -> None:
    stranger = signer(tmp_path, "stranger")
    edit(beside(signed), in_first("key_id", stranger.public_key.id))
    with pytest.raises(SignatureError, match=rf"by key {stranger.public_key.id} .* is not valid"):
        signed_by(signed, stranger.public)


def test_a_broken_signature_beside_one_that_holds_takes_nothing_away(
    signed: Path, release: Signer, tmp_path: Path
) -> None:
    build = signer(tmp_path, "build")
    sign_package(signed, build.key)
    edit(beside(signed), in_first("signature", base64.b64encode(bytes(64)).decode()))
    assert signed_by(signed, release.public, build.public) == [str(build.public)]
    with pytest.raises(SignatureError):
        signed_by(signed, release.public)


def test_a_package_whose_digests_do_not_hold_is_not_signed(tmp_path: Path, release: Signer) -> None:
    path = package(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"compiled code")] ^= 1
    path.write_bytes(content)
    with pytest.raises(PackageError, match="sha256"):
        sign_package(path, release.key)
    assert not beside(path).exists()


def test_a_file_that_is_no_signature_file_is_not_replaced_by_one(tmp_path: Path, release: Signer) -> None:
    path = package(tmp_path)
    precious = tmp_path / "precious.txt"
    precious.write_text("work of months")
    with pytest.raises(SignatureError, match=r"precious\.txt"):
        sign_package(path, release.key, precious)
    assert precious.read_text() == "work of months"


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (rsa.generate_private_key(65537, 2048), "RSA"),
        (ed448.Ed448PrivateKey.generate(), "Ed448"),
        (x25519.X25519PrivateKey.generate(), "X25519"),
        (ec.generate_private_key(ec.SECP256K1()), "secp256k1"),
    ],
)
def test_keys_of_other_kinds_are_refused(tmp_path: Path, key: object, kind: str) -> None:
    files = written(tmp_path, "other", key)
    with pytest.raises(UsageError, match=rf"of the kind {kind}; .* Ed25519(?s:.*)openssl genpkey"):
        read_public_key(files.public)
    with pytest.raises(UsageError, match=rf"of the kind {kind}; .* Ed25519"):
        read_private_key(files.private, no_password)


@pytest.mark.parametrize("text", ["", "no PEM", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key.pem"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"key\.pem is not a public key in PEM form"):
        read_public_key(path)
    with pytest.raises(UsageError, match=r"key\.pem cannot be used"):
        read_private_key(path, no_password)


def test_what_names_no_key_is_a_mistake_and_not_a_way_around(signed: Path, release: Signer, tmp_path: Path) -> None:
    for ask, said in (
        (lambda: read_public_key(release.private), "is a private key"),
        (lambda: read_public_key(tmp_path / "absent.pem"), r"the public key .*absent\.pem cannot be read: No such"),
        (lambda: PackageReader(signed, demand=demand(())), "list of public keys is empty"),
        (lambda: PackageReader(signed, demand=demand(signature=beside(signed))), "without a public key"),
    ):
        with pytest.raises(UsageError, match=said):
            ask()


CHECK = """
import sys
sys.modules["cryptography"] = None
from pathlib import Path
from exportkit.errors import HostError
from exportkit.package.archive import PackageReader
from exportkit.package.keys import read_private_key
from exportkit.package.trust import demand
path, public, private = sys.argv[1:]
def signers(*keys): return PackageReader(path, demand=demand(*keys)).signers
assert signers() == ()
for check in (lambda: signers(public), lambda: read_private_key(Path(private), lambda: "")):
    try: print("done", len(check()))
    except HostError as error: print(error)
"""


def test_checking_takes_no_cryptography_package_and_signing_names_the_way_to_it(
    signed: Path, release: Signer, tmp_path: Path
) -> None:
    checked, refused, *hint = run_interpreter(CHECK, signed, *reversed(release), cwd=tmp_path).splitlines()
    assert checked == "done 1"
    assert "cryptography" in refused
    assert "pip install 'exportkit[sign]'" in "".join(hint)


def test_a_host_without_libcrypto_opens_packages_and_checks_no_signature(
    signed: Path, release: Signer, tmp_path: Path
) -> None:
    (tmp_path / "libcrypto.so.3").write_bytes(b"not a library")
    said = run_interpreter(CHECK, signed, *reversed(release), cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert re.match(r"OpenSSL 3.*libcrypto", said)


def test_a_process_with_another_openssl_checks_signatures(signed: Path, release: Signer, tmp_path: Path) -> None:
    """Calls of libcrypto's own functions would end the process if they reached those of the other one."""
    ctypes.CDLL("libcrypto.so.3")
    library = next(word for word in Path("/proc/self/maps").read_text().split() if word.endswith("/libcrypto.so.3"))
    functions = set(re.findall(r" T (\w+)", output_of("nm", "-D", "--defined-only", library)))
    assert "EVP_DigestVerifyInit" in functions
    other = build(
        tmp_path, "void abort(void);" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in functions), "-w"
    )
    command = [str(program()), "trust", tmp_path / "no-policy", signed, "", release.public]
    said = output_of(*command, env={"LD_PRELOAD": str(other)})
    assert json.loads(said) == {"ok": True, "value": [str(release.public)]}
