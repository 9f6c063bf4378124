"""Revocation lists: what is on one is refused unopened, and one that cannot be followed stops everything."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import exportkit
from exportkit import doctor
from exportkit.errors import (
    ManifestSyntaxError,
    PolicyError,
    RevokedError,
    SignatureMissingError,
    UsageError,
)
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import MANIFEST_NAME
from exportkit.package.revocation import read_revocations, revocations_here, revoke
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from tests.adversarial import forge
from tests.commands import run
from tests.package.signers import package, signer, write_policy

A_DIGEST = "a" * 64


@pytest.fixture(autouse=True)
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's policy, which is not there yet."""
    monkeypatch.delenv("EXPORTKIT_POLICY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "config" / "exportkit" / "policy.json"


@pytest.fixture
def revoked(policy: Path) -> Path:
    """The list that the policies of these tests name."""
    policy.parent.mkdir(parents=True)
    return policy.with_name("revoked.json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return package(tmp_path)


def named(policy: Path, *keys: object, minimum: int = 0, **changes: Any) -> None:
    """A policy with the list, which demands a signature by one of the keys if there are any."""
    lists = [{"list": "revoked.json", "minimum_sequence": minimum}]
    write_policy(policy, *keys, **{"require_signature": bool(keys), "revocations": lists, **changes})


def opened(path: Path, *keys: Path) -> list[str]:
    """The keys that signed, by the check that a load makes."""
    with PackageReader(path, demand=Trust(keys).demand()) as reader:
        return [key.source for key in reader.signers]


def manifest_digest(path: Path) -> str:
    with PackageReader(path) as reader:
        return reader.manifest_sha256


def test_a_revoked_package_is_refused_before_its_manifest_is_read(path: Path, policy: Path, revoked: Path) -> None:
    revoke(revoked, {}, {manifest_digest(path): "wrong weights"})
    named(policy)
    with pytest.raises(RevokedError, match=r"model\.pt2 is revoked by .*revoked\.json \(wrong weights\)"):
        opened(path)
    with pytest.raises(RevokedError):
        exportkit.load(path)
    # A manifest that no reader understands would be another error, if it were read first.
    broken, manifest = path.with_name("broken.pt2"), b"no manifest at all"
    broken.write_bytes(forge.archive(forge.full({MANIFEST_NAME: manifest, **forge.records()})))
    with pytest.raises(ManifestSyntaxError):
        opened(broken)
    revoke(revoked, {}, {hashlib.sha256(manifest).hexdigest(): ""})
    with pytest.raises(RevokedError):
        opened(broken)
    other = package(path.parent, "other.pt2", version="2")
    assert opened(other) == []


def test_no_signature_makes_a_revoked_package_valid(path: Path, policy: Path, revoked: Path, tmp_path: Path) -> None:
    one = signer(tmp_path, "one")
    sign_package(path, one.key)
    named(policy, one.public)
    revoke(revoked, {}, {A_DIGEST: ""})
    assert opened(path) == [str(one.public)]
    revoke(revoked, {}, {manifest_digest(path): ""})
    with pytest.raises(RevokedError, match="No signature makes"):
        opened(path, one.public)


def test_a_revoked_key_counts_for_nobody(path: Path, policy: Path, revoked: Path, tmp_path: Path) -> None:
    old, new = signer(tmp_path, "old"), signer(tmp_path, "new")
    sign_package(path, old.key)
    revoke(revoked, {old.public_key.id: "stolen"}, {})
    named(policy, old.public, new.public)
    with pytest.raises(RevokedError, match=rf"it has one by key {old.public_key.id}, which is revoked by .*\(stolen\)"):
        opened(path)
    named(policy)
    with pytest.raises(RevokedError, match="the caller accepts only key"):
        opened(path, old.public)
    named(policy, old.public)
    with pytest.raises(RevokedError, match="accepts only key"):
        opened(path)
    sign_package(path, new.key)  # both signatures are in the file now
    named(policy, old.public, new.public)
    assert opened(path) == [str(new.public)]
    assert opened(path, old.public, new.public) == [str(new.public)] * 2


def test_where_no_signature_is_required_one_by_a_revoked_key_is_refused(
    path: Path, policy: Path, revoked: Path, tmp_path: Path
) -> None:
    old, new = signer(tmp_path, "old"), signer(tmp_path, "new", curve=ec.SECP256R1())
    revoke(revoked, {old.public_key.id: ""}, {})
    named(policy)
    assert opened(path) == []
    sign_package(path, old.key)
    with pytest.raises(RevokedError, match="is signed only by key"):
        opened(path)
    sign_package(path, new.key)
    assert opened(path) == []


def test_a_bundle_of_another_key_stands_in_for_a_revoked_one(
    path: Path, policy: Path, revoked: Path, tmp_path: Path
) -> None:
    old, new = signer(tmp_path, "old"), signer(tmp_path, "new", curve=ec.SECP384R1())
    revoke(revoked, {old.public_key.id: ""}, {})
    named(policy, old.public, new.public)
    sign_package(path, old.key)
    bundle = sign_package(path, new.key)
    assert opened(path) == [str(new.public)]
    bundle.unlink()
    with pytest.raises((RevokedError, SignatureMissingError)):
        opened(path)


KEY = {"key_id": A_DIGEST, "reason": ""}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "does not exist"),
        ("", "found the end"),
        ("[]", "object"),
        ('{"sequence": 1, "keys": [], "packages": []}', "lacks the key"),
        ({"version": 2}, "expected version 1"),
        ({"sequence": 0}, "at least 1"),
        ({"sequence": 1.5}, "integer"),
        ({"keys": [{"key_id": A_DIGEST}]}, "lacks the key"),
        ({"keys": [{"key_id": A_DIGEST.upper(), "reason": ""}]}, "lower-case hexadecimal"),
        ({"keys": [A_DIGEST]}, "object"),
        ({"keys": [KEY, KEY]}, "the same digest is there twice"),
        ({"keys": [{**KEY, "until": 1}]}, "unknown key"),
        ({"keys": [{**KEY, "reason": "x" * 201}]}, "at most 200 bytes"),
        ({"packages": [KEY]}, "unknown key"),
        ({"comment": ""}, "unknown key"),
        ('{"version": 1, "sequence": 1, "keys": [], "keys": [], "packages": []}', "duplicate"),
        (" " * ((4 << 20) + 1), "more than"),
    ],
)
def test_a_list_that_cannot_be_followed_stops_everything(
    path: Path, policy: Path, revoked: Path, content: Any, what: str
) -> None:
    named(policy)
    if content is not None:
        if isinstance(content, dict):
            content = json.dumps({"version": 1, "sequence": 1, "keys": [], "packages": [], **content})
        revoked.write_text(content)
    if content:
        with pytest.raises(UsageError, match=what):
            read_revocations(revoked)
    for ask in (lambda: opened(path), Trust().demanded_by, revocations_here):
        with pytest.raises(PolicyError, match=f"names the revocation list .*{what}"):
            ask()


@pytest.mark.parametrize(
    "lists",
    [
        "revoked.json",
        ["revoked.json"],
        [{"list": "revoked.json"}],
        [{"list": "revoked.json", "minimum_sequence": "1"}],
        [{"list": "revoked.json", "minimum_sequence": 1, "optional": True}],
        [{"list": "revoked.json", "minimum_sequence": 1}, {"list": "absent.json", "minimum_sequence": 0}],
    ],
)
def test_a_policy_names_lists_in_one_way(path: Path, policy: Path, revoked: Path, lists: Any) -> None:
    revoke(revoked, {}, {})
    named(policy, revocations=lists)
    with pytest.raises(PolicyError, match="loads nothing until"):
        opened(path)


def test_a_list_that_others_may_change_stops_everything(path: Path, policy: Path, revoked: Path) -> None:
    named(policy)
    revoke(revoked, {}, {})
    assert opened(path) == []
    revoked.chmod(0o666)
    with pytest.raises(PolicyError, match=r"revoked\.json, which may be written to by other users"):
        opened(path)
    revoked.unlink()
    os.mkfifo(revoked)
    with pytest.raises(PolicyError, match="not a plain file"):
        opened(path)


def test_an_older_list_does_not_replace_a_newer_one(path: Path, policy: Path, revoked: Path, tmp_path: Path) -> None:
    assert revoke(revoked, {A_DIGEST: "first"}, {}).sequence == 1
    older = Path(shutil.copy(revoked, tmp_path / "older.json"))
    assert revoke(revoked, {"b" * 64: ""}, {}).sequence == 2
    named(policy, minimum=2)
    assert opened(path) == []
    found = read_revocations(older)
    assert found is not None
    merged = revoke(revoked, {A_DIGEST: "again"}, {}, [found])  # what it has already changes nothing
    assert (merged.sequence, len(merged.keys), merged.keys[0].reason) == (2, 2, "first")
    newer = revoke(older, {}, {}, [merged])
    assert newer == merged
    revoked.write_text(json.dumps({"version": 1, "sequence": 1, "keys": [], "packages": []}))
    with pytest.raises(PolicyError, match="has sequence 1; the policy requires at least 2"):
        opened(path)


def test_the_lists_of_both_policies_hold(
    path: Path, policy: Path, revoked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    named(mine / "policy.json")
    revoke(mine / "revoked.json", {}, {manifest_digest(path): ""})
    assert opened(path) == []
    monkeypatch.setenv("EXPORTKIT_POLICY", str(mine / "policy.json"))
    with pytest.raises(RevokedError):
        opened(path)


def test_the_command_makes_a_list_and_adds_to_it(
    capsys: pytest.CaptureFixture[str], path: Path, policy: Path, revoked: Path, tmp_path: Path
) -> None:
    key = signer(tmp_path, "old")
    assert run(capsys, "revoke", revoked, "--key", key.public, "--reason", "stolen")[0] == 0
    code, out, _ = run(capsys, "revoke", revoked, "--package", path, "--json")
    made = json.loads(out)
    assert (code, made["sequence"]) == (0, 2)
    assert made["keys"] == [{"key_id": key.public_key.id, "reason": "stolen"}]
    assert made["packages"] == [{"manifest_sha256": manifest_digest(path), "reason": ""}]
    assert run(capsys, "revoke", revoked)[0] == 2
    assert run(capsys, "revoke", revoked, "--key", "nowhere.pem")[0] == 2
    assert run(capsys, "revoke", revoked, "--key", A_DIGEST, "--reason", "x" * 201)[0] == 2
    named(policy)
    code, out, _ = run(capsys, "verify", path, "--against", "cases", "--json")
    only = json.loads(out)["checks"][0]
    assert (code, only["label"], only["verdict"]["error"]) == (3, "signature", "RevokedError")
    finding = doctor._looked("policies", doctor._policies)
    assert "sequence 2) revokes keys: 1, packages: 1" in finding.detail
    revoked.unlink()
    finding = doctor._looked("policies", doctor._policies)
    assert not finding.ok
