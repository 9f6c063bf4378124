"""What `push` sends and `pull` gets, from a registry with the referrers API and from one without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from exportkit import errors
from exportkit.package.archive import PackageReader
from exportkit.package.revocation import revoke
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.registry.blob_upload import bytes_source, upload
from exportkit.registry.oci_artifact import describe
from exportkit.registry.oci_reference import RegistryReference, parse_reference
from exportkit.registry.pull import Pulled, pull
from exportkit.registry.push import Pushed, push
from exportkit.registry.registry_client import RegistryClient, RegistryOptions
from tests.commands import run
from tests.package import signers
from tests.package.signers import signer, write_policy
from tests.registry.conftest import QUICK, docker_config
from tests.registry.lying_registry import Exchange, LyingRegistry


def _push(registry: LyingRegistry, package: Path, tag: str = "1") -> Pushed:
    return push(package, parse_reference(f"oci://{registry.host}/models/net:{tag}"), QUICK)


def _pull(reference: RegistryReference, output: Path, *keys: Path) -> Pulled:
    return pull(reference, output, trust=Trust(keys), options=QUICK)


def _sign(package: Path, key: signers.Signer) -> Path:
    return sign_package(package, key.key)


@pytest.mark.parametrize("referrers", [False, True])
def test_a_package_comes_back_with_the_signatures_that_it_was_pushed_with(
    registry: LyingRegistry, package: Path, tmp_path: Path, referrers: bool
) -> None:
    registry.referrers = referrers
    own, curve = signer(tmp_path), signer(tmp_path, "curve", curve=ec.SECP256R1())
    files = [_sign(package, own), _sign(package, curve)]
    reference = _push(registry, package).reference
    for key in (own, curve):
        got = _pull(reference, tmp_path / "got.pt2", key.public)
        assert [signed.id for signed in got.signers] == [key.public_key.id]
        assert got.path.read_bytes() == package.read_bytes()
        assert [path.read_bytes() for path in got.signatures] == [path.read_bytes() for path in files]
    assert (f"sha256-{reference.digest[7:]}" in registry.manifests) is not referrers


def test_pushing_again_sends_nothing_and_gives_the_same_digest(registry: LyingRegistry, package: Path) -> None:
    first = _push(registry, package)
    registry.seen.clear()
    again = _push(registry, package, "2")
    assert (first.sent, again.sent, again.reference) == (True, False, first.reference)
    assert {seen.method for seen in registry.seen if "/blobs/" in seen.path} == {"HEAD"}


def test_the_tag_is_set_when_the_signatures_are_there(registry: LyingRegistry, package: Path, tmp_path: Path) -> None:
    _sign(package, signer(tmp_path))
    _push(registry, package)
    assert [seen.path for seen in registry.seen if seen.method == "PUT"][-1] == "/v2/models/net/manifests/1"


def test_what_is_said_about_a_package_follows_the_specification(registry: LyingRegistry, package: Path) -> None:
    pushed = _push(registry, package)
    manifest = json.loads(registry.manifests["1"])
    assert manifest["artifactType"] == "application/vnd.exportkit.package.v1"
    assert manifest["layers"][0]["digest"] == f"sha256:{pushed.sha256}"
    assert manifest["layers"][0]["annotations"] == {"org.opencontainers.image.title": "net.pt2"}
    said = {name.rpartition(".")[2]: value for name, value in manifest["annotations"].items()}
    assert (said["sha256"], said["targets"]) == (pushed.sha256, "cpu_v3")
    assert registry.blobs[manifest["config"]["digest"]].startswith(b"{")


def test_a_required_signature_that_is_not_there_is_missed_before_the_file_comes(
    registry: LyingRegistry, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _push(registry, package).reference
    key = signer(tmp_path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", key.public)))
    registry.seen.clear()
    with pytest.raises(errors.SignatureMissingError, match="has no signature in the registry, and the policy"):
        _pull(reference, tmp_path / "got.pt2")
    assert not any("/blobs/" in seen.path for seen in registry.seen)
    _sign(package, key)
    _push(registry, package)
    assert _pull(reference, tmp_path / "got.pt2").signers


def test_signatures_by_others_are_refused_and_leave_no_file(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    _sign(package, signer(tmp_path, "other"))
    reference = _push(registry, package).reference
    with pytest.raises(errors.SignatureMissingError, match="is not signed as the caller requires"):
        _pull(reference, tmp_path / "got.pt2", signer(tmp_path).public)
    assert [path.name for path in tmp_path.iterdir() if "got" in path.name] == []


def test_bad_signatures_that_somebody_added_do_not_hide_the_good_one(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    good, other = signer(tmp_path), signer(tmp_path, "other")
    file = _sign(package, other)
    forged = file.read_text().replace(other.public_key.id, good.public_key.id)
    file.write_text(forged)
    _push(registry, package)
    file.unlink()
    _sign(package, good)
    reference = _push(registry, package).reference
    assert len([m for m in registry.manifests.values() if b'"subject"' in m]) == 2
    assert _pull(reference, tmp_path / "got.pt2", good.public).signers[0].id == good.public_key.id


def test_signatures_of_an_earlier_package_do_not_stay_beside_a_new_one(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    _sign(package, signer(tmp_path))
    signed = _push(registry, package).reference
    other = signers.package(tmp_path, "other.pt2", version="2")
    unsigned = _push(registry, other, "2").reference
    got = tmp_path / "got.pt2"
    assert _pull(signed, got).signatures
    assert _pull(unsigned, got).signatures == ()
    assert not got.with_name("got.pt2.sig").exists()


def test_a_revoked_package_is_not_pulled_where_no_signature_is_required(
    registry: LyingRegistry, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _push(registry, package).reference
    with PackageReader(package) as reader:
        revoke(tmp_path / "revoked.json", {}, {reader.manifest_sha256: "wrong"})
    lists = [{"list": "revoked.json", "minimum_sequence": 0}]
    policy = write_policy(tmp_path / "policy.json", require_signature=False, revocations=lists)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    with pytest.raises(errors.RevokedError):
        _pull(reference, tmp_path / "got.pt2")
    assert not (tmp_path / "got.pt2").exists()


def test_a_signature_that_the_caller_names_is_used_and_stays(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    reference, key = _push(registry, package).reference, signer(tmp_path)
    named = _sign(package, key).rename(tmp_path / "got.pt2.sig")
    trust = Trust((key.public,), named)
    assert pull(reference, tmp_path / "got.pt2", trust=trust, options=QUICK).signers
    assert named.exists()


def test_a_signature_of_another_package_is_not_pushed(registry: LyingRegistry, package: Path, tmp_path: Path) -> None:
    other = signers.package(tmp_path, "other.pt2", version="2")
    _sign(other, signer(tmp_path)).rename(package.with_name("net.pt2.sig"))
    with pytest.raises(errors.SignatureError, match="belongs to another package"):
        _push(registry, package)
    assert registry.manifests == {}


def test_an_upload_that_is_cut_goes_on_where_the_registry_is(registry: LyingRegistry, package: Path) -> None:
    content = package.read_bytes()
    lost = iter([2])

    def lie(exchange: Exchange) -> bool:
        if exchange.command != "PATCH" or next(lost, None) is None:
            return False
        registry.uploads["upload0"] += exchange.body[:300]  # it got a part, and its answer did not come
        exchange.cut()
        return True

    registry.lie = lie
    client = RegistryClient(parse_reference(f"oci://{registry.host}/models/net:1"), "pull,push", QUICK)
    assert upload(client, describe(content, "x"), bytes_source(content), piece=1000)
    ranges = [seen.headers["Content-Range"] for seen in registry.seen if seen.method == "PATCH"]
    assert ranges[:3] == ["0-999", "300-1299", "1300-2299"]
    assert content in registry.blobs.values()


@pytest.mark.parametrize("lies", ["too large", "lost", "ends in nothing"])
def test_an_upload_that_fails_in_other_ways_begins_again(registry: LyingRegistry, package: Path, lies: str) -> None:
    content = package.read_bytes() * 2000
    told = iter([2])

    def lie(exchange: Exchange) -> bool:
        command = "PUT" if lies == "ends in nothing" else "PATCH"
        large = lies == "too large" and len(exchange.body) > 1 << 20
        if exchange.command != command or not (large or (lies != "too large" and next(told, None))):
            return False
        exchange.answer(413 if large else 404)
        return True

    registry.lie = lie
    client = RegistryClient(parse_reference(f"oci://{registry.host}/models/net:1"), "pull,push", QUICK)
    assert upload(client, describe(content, "x"), bytes_source(content))
    assert content in registry.blobs.values()


def test_an_upload_that_never_ends_well_ends_with_an_error(registry: LyingRegistry, package: Path) -> None:
    def lie(exchange: Exchange) -> bool:
        if exchange.command == "PUT":
            exchange.answer(404)
        return exchange.command == "PUT"

    registry.lie = lie
    with pytest.raises(errors.RegistryError, match=r"answered PUT .* with status 404"):
        _push(registry, package)


_PASSWORDS = [{"auth": "dXNlcjpzZWNyZXQ="}, {"username": "user", "password": "secret"}]


# An identity token is no password: a registry without tokens does not take it.
@pytest.mark.parametrize(
    ("entry", "tokens"),
    [*((entry, tokens) for entry in _PASSWORDS for tokens in (False, True)), ({"identitytoken": "identity"}, True)],
)
def test_a_registry_gets_the_credentials_of_docker(
    registry: LyingRegistry, package: Path, tmp_path: Path, tokens: bool, entry: dict[str, str]
) -> None:
    registry.password, registry.tokens = "user:secret", tokens
    docker_config(tmp_path, auths={f"https://{registry.host}": entry, "other.example": {"auth": "eDp5"}})
    assert _push(registry, package).sent
    sent = {seen.headers.get("Authorization") for seen in registry.seen}
    assert not any(value and "eDp5" in value for value in sent)


def test_a_registry_without_credentials_says_which_command_makes_them(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    docker_config(tmp_path, auths={"other.example": {"auth": "eDp5"}})
    registry.password = "user:secret"
    with pytest.raises(errors.RegistryError, match=f"docker login {registry.host}"):
        _push(registry, package)
    registry.tokens = True
    with pytest.raises(errors.RegistryError, match="without credentials"):
        _push(registry, package)


@pytest.mark.process
@pytest.mark.parametrize("way", ["credHelpers", "credsStore"])
def test_credentials_of_a_helper_and_of_a_store_are_used(
    registry: LyingRegistry, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    helper = tmp_path / "docker-credential-tests"
    answer = '{"ServerURL": "x", "Username": "user", "Secret": "secret"}'
    helper.write_text(
        f"#!/bin/sh\nread host\nif [ $1 $host = get{registry.host} ] || [ \"$1 $host\" = 'get {registry.host}' ]; "
        f"then echo '{answer}'; else echo 'credentials not found in native keychain'; exit 1; fi\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    docker_config(tmp_path, **{way: {registry.host: "tests"} if way == "credHelpers" else "tests"})
    registry.password = "user:secret"
    assert _push(registry, package).sent


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be used"),
        ('{"auths": {"HOST": {"auth": "?"}}}', "is not base64 of"),
        ('{"credHelpers": {"HOST": "../evil"}}', "cannot be a program's name"),
        ('{"credHelpers": {"HOST": "not-there"}}', "does not work"),
    ],
)
@pytest.mark.process
def test_a_configuration_of_docker_that_is_wrong_is_named(
    registry: LyingRegistry, package: Path, tmp_path: Path, content: str, says: str
) -> None:
    docker_config(tmp_path)
    (tmp_path / "docker" / "config.json").write_text(content.replace("HOST", registry.host))
    registry.password = "user:secret"
    with pytest.raises(errors.UsageError, match=says):
        _push(registry, package)


@pytest.mark.parametrize(
    "text",
    [
        *("oci://host/net", "oci://host", "oci://host/", "host/net:1", "oci://host/Net:1", "oci://host/../net:1"),
        *("oci://host/net:", "oci://host/net@sha256:00", "oci://host//net:1", "oci://user@host/net:1", "oci:///net:1"),
        *("oci://host/net:1?x", "oci://host/.net:1", "oci://host:port/net:1", "oci://host/net:1\n", "oci://-/net:1"),
        "oci://host/" + "n" * 300 + ":1",
    ],
)
def test_what_is_no_reference_is_a_usage_error(text: str) -> None:
    with pytest.raises(errors.UsageError):
        parse_reference(text)


@pytest.mark.parametrize("text", ["oci://h/a/b_c.d-e:1.0-x", "oci://h:5/n@sha256:" + "a" * 64, "oci://[::1]:5/n:1"])
def test_a_reference_is_what_it_was_parsed_from(text: str) -> None:
    assert str(parse_reference(text)) == text


def test_another_users_folder_in_the_place_of_ours_is_refused(
    registry: LyingRegistry, package: Path, tmp_path: Path
) -> None:
    reference = _push(registry, package).reference
    assert reference.digest is not None
    folder = tmp_path / f".got.pt2.{reference.digest[7:23]}.pull"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(errors.UsageError, match="others may change it"):
        _pull(reference, tmp_path / "got.pt2")
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UsageError, match="is in the way"):
        _pull(reference, tmp_path / "got.pt2")


def test_the_commands_say_what_they_did(
    registry: LyingRegistry, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = signer(tmp_path)
    _sign(package, key)
    reference = f"oci://{registry.host}/models/net:1"
    code, out, _ = run(capsys, "push", reference, package)
    assert (code, "net.pt2.sig" in out) == (0, True)
    by_digest = out.splitlines()[-1]
    assert re.fullmatch(rf"oci://{registry.host}/models/net@sha256:[0-9a-f]{{64}}", by_digest)
    code, out, _ = run(capsys, "pull", by_digest, "-o", tmp_path / "got.pt2", "--public-key", key.public)
    assert (code, f"signed by {key.public_key.id}, as required" in out) == (0, True)
    code, out, _ = run(capsys, "inspect", reference)
    assert (code, by_digest in out, "cpu_v3" in out, ".sig in sha256:" in out) == (0, True, True, True)
    code, out, _ = run(capsys, "inspect", reference, "--json")
    assert json.loads(out)["manifest"]["targets"][0]["name"] == "cpu_v3"
    code, _, err = run(capsys, "inspect", reference, "--public-key", key.public)
    assert (code, "pull it first" in err) == (2, True)
    code, _, err = run(capsys, "pull", f"oci://{registry.host}/models/net:none")
    assert (code, "there is no oci://" in err) == (2, True)
    code, _, err = run(capsys, "push", by_digest, package)
    assert (code, "give a name and a tag" in err) == (2, True)


def test_options_that_reach_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    options = RegistryOptions(authorities=tmp_path / "ca.pem")
    with pytest.raises(errors.UsageError, match="has no authorities' certificates"):
        RegistryClient(parse_reference("oci://h.example/n:1"), "pull", options).ask("GET", "x")
