"""Policies: what makes signatures mandatory cannot be weakened, and one that cannot be honoured stops everything."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from exportkit import errors
from exportkit.errors import HostError, PolicyError, SignatureMissingError
from exportkit.package.archive import PackageReader
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust, demand
from tests.cpp_reader import program
from tests.package.c_library import build
from tests.package.signers import Signer, package, signer, write_policy
from tests.subprocesses import run_interpreter

MAX_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `trusted` takes the system's policy to be; the user's is under `home`, and there is none yet."""
    monkeypatch.delenv("EXPORTKIT_POLICY", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "etc" / "policy.json"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".config" / "exportkit" / "policy.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return package(tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> Signer:
    return signer(tmp_path, "one")


@pytest.fixture
def two(tmp_path: Path) -> Signer:
    return signer(tmp_path, "two")


def trusted(path: Path, *keys: Path) -> list[str]:
    """Where the keys come from that have signed, by the library's own check with another place for /etc/exportkit."""
    command = [program(), "trust", path.parent / "etc" / "policy.json", path, "", *keys]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"], hint=answer["hint"] or None)
    signers: list[str] = answer["value"]
    return signers


def refused(path: Path, *keys: Path) -> str:
    with pytest.raises(SignatureMissingError) as caught:
        trusted(path, *keys)
    return caught.value.message


def test_what_is_required_is_required_of_everyone(path: Path, system: Path, one: Signer) -> None:
    assert trusted(path) == []
    write_policy(system, one.public)
    assert f"as the policy {system} requires" in refused(path)
    sign_package(path, one.key)
    assert trusted(path) == [str(one.public)]


def test_python_asks_for_what_the_users_policy_does(
    path: Path, user: Path, one: Signer, two: Signer, tmp_path: Path
) -> None:
    assert Trust().demanded_by() is None
    assert Trust([one.public]).demanded_by() == "the caller"
    write_policy(user, one.public)
    assert Trust().demanded_by() == f"the policy {user}"
    assert Trust([two.public]).demanded_by() == "the caller"
    with pytest.raises(SignatureMissingError, match="as the policy"):
        PackageReader(path, demand=demand())
    sign_package(path, one.key)
    with PackageReader(path, demand=demand()) as reader:
        assert [key.source for key in reader.signers] == [str(one.public)]
    user.write_text("{}")
    for ask in (
        Trust().demanded_by,
        lambda: PackageReader(path, demand=demand()),
        lambda: Trust().refuse_foreign(path),
    ):
        with pytest.raises(PolicyError, match="loads nothing until"):
            ask()
    PackageReader(path).close()  # nobody asked


PASSWORD_FILE = """
#include <pwd.h>
#include <stdlib.h>
struct passwd* getpwuid(uid_t user) {
  static struct passwd found;
  found.pw_dir = getenv("TEST_HOME");
  return &found;
}
int getpwuid_r(uid_t user, struct passwd* found, char* buffer, size_t size, struct passwd** result) {
  *found = *getpwuid(user);
  *result = found;
  return 0;
}
"""
DEMANDED = "from exportkit.package.trust import Trust; print(Trust().demanded_by())"


def test_without_a_home_in_the_environment_it_is_the_one_of_the_password_file(
    user: Path, one: Signer, tmp_path: Path
) -> None:
    write_policy(user, one.public)
    environment = {"HOME": "", "TEST_HOME": str(tmp_path / "home"), "LD_PRELOAD": str(build(tmp_path, PASSWORD_FILE))}
    assert run_interpreter(DEMANDED, cwd=tmp_path, **environment) == f"the policy {user}\n"


def test_no_user_and_no_argument_takes_anything_from_the_system(
    path: Path, system: Path, user: Path, one: Signer, two: Signer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_policy(system, one.public)
    sign_package(path, two.key)
    write_policy(user, require_signature=False)
    assert str(system) in refused(path)
    write_policy(user, two.public)
    assert str(system) in refused(path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(tmp_path / "mine.json"))
    write_policy(tmp_path / "mine.json", require_signature=False)
    assert str(system) in refused(path)
    assert str(system) in refused(path, two.public)


def test_the_caller_the_user_and_the_system_are_each_satisfied(
    path: Path, system: Path, user: Path, one: Signer, two: Signer, tmp_path: Path
) -> None:
    three = signer(tmp_path, "three")
    write_policy(system, one.public)
    write_policy(user, two.public)
    for key, missing in ((one, "the caller"), (three, str(user))):
        sign_package(path, key.key)
        assert missing in refused(path, three.public)
    sign_package(path, two.key)
    assert trusted(path, three.public) == [str(three.public), str(one.public), str(two.public)]


def test_the_environment_names_a_policy_in_place_of_the_users(
    path: Path, user: Path, one: Signer, two: Signer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_policy(user, one.public)
    write_policy(tmp_path / "mine.json", two.public)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(tmp_path / "mine.json"))
    sign_package(path, two.key)
    assert trusted(path) == [str(two.public)]
    monkeypatch.setenv("EXPORTKIT_POLICY", "")
    assert str(user) in refused(path)
    monkeypatch.setenv("EXPORTKIT_POLICY", "/nowhere/policy.json")
    with pytest.raises(PolicyError, match=r"/nowhere/policy\.json does not exist"):
        trusted(path)


def test_the_configuration_folder_is_where_the_environment_says(
    path: Path, one: Signer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_policy(tmp_path / "config" / "exportkit" / "policy.json", one.public)
    assert trusted(path) == []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    refused(path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")  # relative: to be ignored
    monkeypatch.chdir(tmp_path)
    assert trusted(path) == []


def test_keys_are_named_from_the_policys_folder_or_given_whole(
    path: Path, system: Path, one: Signer, two: Signer
) -> None:
    sign_package(path, one.key)
    for key in ("keys/release.pem", one.public.read_text(), one.public):
        write_policy(system, key)
        (system.parent / "keys").mkdir(exist_ok=True)
        (system.parent / "keys" / "release.pem").write_bytes(one.public.read_bytes())
        assert len(trusted(path)) == 1
    write_policy(system, two.public, one.public)
    assert trusted(path) == [str(one.public)]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "found the end"),
        ("{}", "object lacks the key"),
        ("[]", "object"),
        ('{"version": 2, "require_signature": false, "public_keys": []}', "version"),
        ('{"version": 1, "require_signature": 0, "public_keys": []}', "require_signature"),
        ('{"version": 1, "require_signature": true, "public_keys": []}', "names no public key"),
        ('{"version": 1, "require_signature": true, "public_keys": "a.pem"}', "public_keys"),
        ('{"version": 1, "require_signature": false, "public_keys": [], "allow": ["x"]}', "allow"),
        ('{"version": 1, "require_signature": true, "require_signature": false, "public_keys": []}', "duplicate"),
        ('{"version": 1, "require_signature": true, "public_keys": ["absent.pem"]}', "absent.pem"),
        ('{"version": 1, "require_signature": true, "public_keys": ["policy.json"]}', "not a public key in PEM form"),
        ("[" * 10_000, "nested deeper"),
        (" " * (MAX_BYTES + 1), f"more than {MAX_BYTES}"),
    ],
)
@pytest.mark.parametrize("which", ["system", "user"])
def test_a_policy_that_cannot_be_honoured_stops_everything(
    path: Path, system: Path, user: Path, which: str, content: str, named: str
) -> None:
    file = system if which == "system" else user
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(PolicyError, match=named) as caught:
        trusted(path)
    assert isinstance(caught.value, HostError)
    assert str(file) in caught.value.message
    assert "loads nothing until" in (caught.value.hint or "")


def test_a_policy_or_a_key_that_others_may_change_stops_everything(path: Path, system: Path, one: Signer) -> None:
    write_policy(system, one.public)
    for mode in (0o666, 0o664, 0o646):
        system.chmod(mode)
        with pytest.raises(PolicyError, match="may be written to by other users"):
            trusted(path)
    system.chmod(0o644)
    system.parent.chmod(0o777)
    with pytest.raises(PolicyError, match=r"is in .*etc, which may be written to by other users"):
        trusted(path)
    system.parent.chmod(0o1777)  # as /tmp is: only its owner renames or removes what is in it
    refused(path)
    one.public.chmod(0o666)
    with pytest.raises(PolicyError, match=r"one\.pem may be written to by other users"):
        trusted(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_policy_of_another_user_stops_everything(path: Path, system: Path, one: Signer) -> None:
    write_policy(system, one.public)
    os.chown(system, 12345, -1)
    with pytest.raises(PolicyError, match=r"policy\.json belongs to another user"):
        trusted(path)
    os.chown(system, 0, -1)
    os.chown(system.parent, 12345, -1)
    system.parent.chmod(0o1777)  # its owner renames what is in it all the same
    with pytest.raises(PolicyError, match=r"etc, which belongs to another user"):
        trusted(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_stops_everything(path: Path, system: Path, make: Callable[[Path], None]) -> None:
    system.parent.mkdir()
    make(system)
    with pytest.raises(PolicyError, match=r"not a plain file|Too many levels"):
        trusted(path)


def test_links_to_a_policy_are_followed(path: Path, system: Path, one: Signer, tmp_path: Path) -> None:
    """A container's configuration is mounted as links."""
    write_policy(tmp_path / "mounted" / "policy.json", one.public)
    system.parent.mkdir()
    system.symlink_to(tmp_path / "mounted" / "policy.json")
    refused(path)
    (tmp_path / "mounted").chmod(0o777)
    with pytest.raises(PolicyError, match="mounted, which may be written to"):
        trusted(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_of_another_user_to_a_policy_stops_everything(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead to another policy of ours, or of root's, that demands less."""
    write_policy(tmp_path / "ours" / "policy.json", require_signature=False)
    link = tmp_path / "shared" / "link"
    link.parent.mkdir()
    link.parent.chmod(0o1777)
    link.symlink_to(tmp_path / "ours")
    monkeypatch.setenv("EXPORTKIT_POLICY", str(link / "policy.json"))
    assert trusted(path) == []
    os.lchown(link, 12345, -1)
    with pytest.raises(PolicyError, match=r"is behind the link .*shared/link of another user"):
        trusted(path)
