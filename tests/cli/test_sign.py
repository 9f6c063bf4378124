"""Signing and checking signatures from the command line, with keys as the help says to make them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import run
from tests.package.signers import package, signer, write_policy


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    for name in ("EXPORTKIT_POLICY", "EXPORTKIT_KEY_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tiny_package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_package, tmp_path / "model.pt2"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make keys with")
def test_the_commands_that_the_help_shows_sign_a_package_and_check_it(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model.rename("arr_coc.pt2")
    _, text, _ = run(capsys, "sign", "--help")
    commands = re.findall(r"^ +((?:openssl|exportkit) .*)$", text, re.MULTILINE)
    assert [command.split()[:2] for command in commands] == [
        ["openssl", "genpkey"],
        ["openssl", "pkey"],
        ["exportkit", "sign"],
        ["exportkit", "verify"],
    ]
    for command in commands:
        program, *arguments = command.split()
        if program == "openssl":
            subprocess.run([program, *arguments], check=True, capture_output=True)
        else:
            assert run(capsys, *arguments)[0] == 0


def test_verify_checks_the_signature_first_and_says_so(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    release = signer(tmp_path)
    code, out, _ = run(capsys, "sign", model, "--key", release.private, "--json")
    key_id = release.public_key.id
    assert code == 0
    assert json.loads(out) == {"package": str(model), "signature": f"{model}.sig", "key_id": key_id}
    arguments = ("verify", model, "--against", "cases", "--public-key", release.public)
    code, out, _ = run(capsys, *arguments, "--json")
    first, *others = json.loads(out)["checks"]
    assert code == 0
    assert (first["against"], first["label"]) == ("package", "signature")
    assert first["verdict"]["kind"] == "signed"
    assert first["verdict"]["key_ids"] == [key_id]
    assert [check["verdict"]["kind"] for check in others] == ["match", "match"]
    code, out, _ = run(capsys, *arguments)
    assert f"signed by {key_id}" in out


def test_verify_looks_no_further_where_the_signature_is_not_the_wanted_one(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    stranger = signer(tmp_path, "stranger")
    code, out, _ = run(capsys, "verify", model, "--public-key", stranger.public, "--json")
    (only,) = json.loads(out)["checks"]
    assert (code, only["label"], only["verdict"]["error"]) == (3, "signature", "SignatureMissingError")
    assert stranger.public_key.id in only["verdict"]["message"]


def test_a_policy_that_cannot_be_read_is_the_machines_fault(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORTKIT_POLICY", "/nowhere.json")
    code, out, _ = run(capsys, "verify", model, "--json")
    (only,) = json.loads(out)["checks"]
    assert (code, only["label"], only["verdict"]["error"]) == (4, "signature", "PolicyError")


def test_under_a_policy_only_what_is_signed_is_packaged_and_signed_last(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    release, output = signer(tmp_path), tmp_path / "package.pt2"
    write_policy(tmp_path / "config" / "exportkit" / "policy.json", release.public)
    code, _, err = run(capsys, "package", model, "-o", output, "--no-verify")
    assert (code, f"{model.name} is not signed as the policy" in err) == (3, True)
    run(capsys, "sign", model, "--key", release.private, "-o", tmp_path / "elsewhere.sig")
    elsewhere = ("--public-key", release.public, "--signature", tmp_path / "elsewhere.sig")
    assert run(capsys, "package", model, "-o", output, "--no-verify", *elsewhere)[0] == 0
    assert not Path(f"{output}.sig").exists()
    run(capsys, "sign", model, "--key", release.private)
    code, out, _ = run(capsys, "package", model, "-o", output, "--sign-key", release.private, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["signature"] == f"{output}.sig"
    assert [check["verdict"]["kind"] for check in document["verification"]["checks"]] == ["match", "match"]
    assert {path.name for path in tmp_path.glob("*package*")} == {"package.pt2", "package.pt2.sig"}
    assert run(capsys, "verify", output, "--against", "cases")[0] == 0
    code, out, _ = run(capsys, "package", model, "-o", output, "--sign-key", release.private, "--no-verify")
    assert (code, f"{output}.sig: signed by key {release.public_key.id}" in out) == (0, True)


def test_an_encrypted_key_has_its_password_from_the_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, locked = package(tmp_path), signer(tmp_path, password="correct horse")
    command = ("sign", path, "--key", locked.private)
    code, _, err = run(capsys, *command)
    assert code == 2
    assert "Set EXPORTKIT_KEY_PASSWORD" in err
    for password, expected in (("wrong", 2), ("", 2), ("correct horse", 0)):
        monkeypatch.setenv("EXPORTKIT_KEY_PASSWORD", password)
        code, out, err = run(capsys, *command)
        assert code == expected, err
        assert "correct horse" not in out + err


def test_a_key_that_others_can_read_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, release = package(tmp_path), signer(tmp_path)
    for mode, warned in ((0o600, False), (0o640, True), (0o604, True)):
        release.private.chmod(mode)
        code, _, err = run(capsys, "sign", path, "--key", release.private)
        assert (code, "chmod 600" in err) == (0, warned)


def test_a_signature_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, release = package(tmp_path), signer(tmp_path)
    code, _, err = run(capsys, "sign", path, "--key", release.private, "-o", tmp_path / "absent" / "x.sig")
    assert (code, "there is no folder" in err) == (2, True)


def test_inspect_shows_who_signed_and_believes_it_with_a_key_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, release, stranger = package(tmp_path), signer(tmp_path), signer(tmp_path, "stranger")
    key_id = release.public_key.id
    assert "none beside it" in run(capsys, "inspect", path)[1]
    assert json.loads(run(capsys, "inspect", path, "--json")[1])["signatures"] == []
    run(capsys, "sign", path, "--key", release.private)
    assert f"model.pt2.sig names {key_id}; --public-key checks it" in run(capsys, "inspect", path)[1]
    document = json.loads(run(capsys, "inspect", path, "--json")[1])
    assert document["signatures"] == [{"path": f"{path}.sig", "key_ids": [key_id], "problem": None}]
    assert document["signed_by"] == []
    command = ("inspect", path, "--public-key", release.public)
    assert re.search(rf"signed by +{key_id}", run(capsys, *command)[1])
    assert json.loads(run(capsys, *command, "--json")[1])["signed_by"] == [key_id]
    assert run(capsys, "inspect", path, "--public-key", stranger.public)[0] == 3
    Path(f"{path}.sig").write_text("{")
    code, out, _ = run(capsys, "inspect", path)
    assert (code, "the signature file model.pt2.sig does not follow FORMAT.md" in out) == (0, True)
