"""Where libraries are unpacked to: once, whole, and only where nobody else can exchange them."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exportkit.errors import DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Library
from exportkit.runtime.cache import cache_directory, unpacked
from tests.runtime import tiny

CONTENT = b"\x7fELF a library" * 1000
RECORD = "exportkit/ops/linux-x86_64/libtoy.so"


@pytest.fixture
def library() -> Library:
    return Library(
        record=RECORD,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        platform="linux-x86_64",
        device="cpu",
        kernels=("cpu",),
        defines=(),
        needs_torch="2.11",
        torch_bound=None,
        needs=(),
    )


@pytest.fixture
def package(library: Library, tmp_path: Path) -> Path:
    code = tmp_path / "model.so"
    code.write_bytes(b"\x7fELF compiled code")
    return tiny.write(
        tmp_path / "toy.pt2", {"a.wrapper.so": code}, extra={RECORD: CONTENT}, libraries=(library,), cases=()
    )


@pytest.fixture
def reader(package: Path):
    with PackageReader(package) as reader:
        yield reader


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("EXPORTKIT_CACHE", "/mine")
    assert cache_directory() == Path("/mine")
    monkeypatch.delenv("EXPORTKIT_CACHE")
    assert cache_directory() == Path("/somewhere/exportkit")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path("/home/someone/.cache/exportkit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/home/someone/.cache/exportkit")


def test_a_library_is_unpacked_once_under_its_digest_for_its_user_alone(reader, library):
    path = unpacked(reader, library)
    assert path == cache_directory() / "libraries" / library.sha256 / "libtoy.so"
    assert path.read_bytes() == CONTENT
    for private in (path, path.parent, path.parent.parent, cache_directory()):
        assert stat.S_IMODE(private.stat().st_mode) & 0o077 == 0
    before = path.stat()
    assert unpacked(reader, library) == path
    assert path.stat().st_ino == before.st_ino
    assert [entry.name for entry in path.parent.iterdir()] == ["libtoy.so"]


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"\x7fELF something else"])
def test_a_damaged_or_exchanged_file_is_unpacked_again(reader, library, damage):
    path = unpacked(reader, library)
    path.write_bytes(damage)
    assert unpacked(reader, library).read_bytes() == CONTENT


def test_a_link_in_its_place_is_not_followed(reader, library, tmp_path):
    path = unpacked(reader, library)
    elsewhere = tmp_path / "elsewhere.so"
    elsewhere.write_bytes(CONTENT)  # today; its owner may change it after it was checked
    path.unlink()
    path.symlink_to(elsewhere)
    assert not unpacked(reader, library).is_symlink()


def test_many_at_once_unpack_one_whole_file(reader, library):
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: unpacked(reader, library).read_bytes(), range(24)))
    assert set(paths) == {CONTENT}


def test_a_cache_that_others_may_write_to_is_not_used(reader, library):
    cache_directory().mkdir(mode=0o700)
    cache_directory().chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"cannot use its cache .*exportkit-cache \(other users may write to it"):
        path = unpacked(reader, library)
    assert cache_directory() not in path.parents
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.parent.parent.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_cache_of_another_user_is_not_used(reader, library):
    cache_directory().mkdir(mode=0o700)
    os.chown(cache_directory(), 12345, -1)
    with pytest.warns(RuntimeWarning, match="it belongs to another user"):
        assert unpacked(reader, library).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_made_is_replaced_by_a_temporary_one(reader, library, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="Set EXPORTKIT_CACHE to a private, writable directory"):
        first = unpacked(reader, library)
    with pytest.warns(RuntimeWarning):
        assert unpacked(reader, library) == first


def test_a_record_that_does_not_hold_is_never_unpacked(package, library):
    at = package.read_bytes().find(CONTENT)
    with open(package, "r+b") as file:
        file.seek(at + 100)
        file.write(b"\xff")
    with PackageReader(package) as reader, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DigestMismatchError, match="libtoy"):
            unpacked(reader, library)
    assert list((cache_directory() / "libraries" / library.sha256).iterdir()) == []


def test_a_cache_below_a_directory_where_others_rename_things_is_not_used(reader, library, monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(shared / "deep" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"other users may rename what is in it: .*shared\)"):
        assert shared not in unpacked(reader, library).parents
    shared.chmod(0o1777)  # as /tmp is
    assert shared in unpacked(reader, library).parents


def test_a_link_to_the_cache_is_followed_once_and_its_target_must_be_private(reader, library, monkeypatch, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(link))
    assert unpacked(reader, library).is_relative_to(real), "the path that is loaded goes by no link"
    real.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users may write to it"):
        unpacked(reader, library)


def test_a_link_among_the_caches_own_folders_is_not_followed(reader, library, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    cache_directory().mkdir(mode=0o700)
    (cache_directory() / "libraries").symlink_to(elsewhere)
    with pytest.warns(RuntimeWarning, match="it is a link"):
        unpacked(reader, library)
    assert list(elsewhere.iterdir()) == []


def test_a_file_that_others_may_write_to_is_replaced(reader, library):
    path = unpacked(reader, library)
    path.chmod(0o666)  # planted while the directory was open, say; its content is right, so far
    assert stat.S_IMODE(unpacked(reader, library).stat().st_mode) == 0o600


def test_a_pipe_in_its_place_is_replaced(reader, library):
    path = unpacked(reader, library)
    path.unlink()
    os.mkfifo(path)
    assert unpacked(reader, library).read_bytes() == CONTENT
