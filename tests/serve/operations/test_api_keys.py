from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from exportkit.errors import UsageError
from exportkit.serve.operations.api_keys import ApiKeys

KEY, OTHER = "0123456789abcdef0123", "another-key-of-a-client"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text(f"# clients\n{KEY}\n\n  {OTHER}  \n")
    path.chmod(0o640)
    return path


def test_each_key_of_the_file_is_allowed_and_nothing_else(file: Path):
    keys = ApiKeys(file)
    assert all(keys.allow(given.encode()) for given in (f"Bearer {KEY}", f"bearer  {OTHER}"))
    bearers = ("", KEY[:-1], f"{KEY}x", KEY.upper(), "# clients", "\xff\x00")
    others = ("", "Bearer", KEY, f"Token {KEY}", f"Basic {base64.b64encode(f':{KEY}'.encode()).decode()}")
    given = [None, *(text.encode("latin-1") for text in (*others, *(f"Bearer {text}" for text in bearers)))]
    assert [each for each in given if keys.allow(each)] == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no key"),
        ("# only a comment\n\n", "has no key"),
        ("short\n", "the key in line 1 of .* has 5 characters, and needs at least 16"),
        (f"{KEY}ü\n", "line 1 of .* has a character"),
        (f"{KEY} rows=5\n", "line 1 of .* has a character"),
    ],
)
def test_a_file_without_good_keys_is_refused(file: Path, content: str, says: str):
    file.write_text(content)
    with pytest.raises(UsageError, match=says) as refusal:
        ApiKeys(file)
    assert KEY not in str(refusal.value)
    assert "openssl rand -hex 32" in str(refusal.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o641])
def test_a_file_that_others_may_use_is_refused_with_what_to_do(file: Path, mode: int):
    file.chmod(mode)
    with pytest.raises(UsageError, match=f"is open to every user of this machine .mode {mode:04o}") as refusal:
        ApiKeys(file)
    assert f"chmod o-rwx {file}" in str(refusal.value)


def test_what_is_no_file_or_too_large_is_refused(file: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        ApiKeys(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        ApiKeys(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="is not a regular file"):
        ApiKeys(tmp_path / "pipe")
    file.write_bytes(b"x" * (1 << 20) + b"y")
    with pytest.raises(UsageError, match="is larger than 1 MiB"):
        ApiKeys(file)


def test_keys_are_read_again_and_stay_where_the_file_is_bad(file: Path):
    keys = ApiKeys(file)
    file.write_text("a-new-key-for-everybody\n")
    keys.reload()
    assert keys.allow(b"Bearer a-new-key-for-everybody")
    assert not keys.allow(f"Bearer {KEY}".encode())
    file.write_text("")
    with pytest.raises(UsageError):
        keys.reload()
    assert keys.allow(b"Bearer a-new-key-for-everybody")


def test_no_key_is_kept_in_memory(file: Path):
    assert KEY.encode() not in repr(vars(ApiKeys(file))).encode()
