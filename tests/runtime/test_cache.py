"""What packages are unpacked to: once, whole, and only where nobody else can exchange it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exportkit.errors import DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Library
from exportkit.runtime.cache import cache_directory, trust
from exportkit.runtime.cache.entries import RECORD as VERIFIED
from exportkit.runtime.cache.entries import library_contents, target_contents, unpack
from tests.runtime import tiny

CONTENT = b"\x7fELF a library" * 1000
CODE = b"\x7fELF compiled code"
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
    code.write_bytes(CODE)
    return tiny.write(
        tmp_path / "toy.pt2", {"a.wrapper.so": code}, extra={RECORD: CONTENT}, libraries=(library,), cases=()
    )


@pytest.fixture
def reader(package: Path):
    with PackageReader(package) as reader:
        yield reader


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """Gets an item for each file of the cache that is hashed."""
    seen: list[int] = []
    stream_sha256 = trust.stream_sha256

    def counting(file):
        seen.append(file.fileno())
        return stream_sha256(file)

    monkeypatch.setattr(trust, "stream_sha256", counting)
    return seen


def unpacked(reader: PackageReader, library: Library, *, again: bool = False) -> Path:
    with unpack(reader, library_contents(reader, library), again=again) as entry:
        return entry.folder / "libtoy.so"


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
    assert {entry.name for entry in path.parent.iterdir()} == {"libtoy.so", "~verified.json", "~lock"}


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
    assert [path.name for path in (cache_directory() / "libraries" / library.sha256).iterdir()] == ["~lock"]


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


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_is_unpacked_under_the_digest_of_what_sha256sum_would_print(reader):
    (target,) = reader.manifest.targets
    line = f"{hashlib.sha256(CODE).hexdigest()}  a.wrapper.so\n"
    for _ in range(2):
        with unpack(reader, target_contents(reader, target), again=False) as entry:
            assert entry.folder == cache_directory() / "targets" / hashlib.sha256(line.encode()).hexdigest()
            assert (entry.folder / "a.wrapper.so").read_bytes() == CODE
            assert stat.S_IMODE((entry.folder / "a.wrapper.so").stat().st_mode) == 0o600


def test_targets_of_the_same_files_share_an_entry_and_others_do_not(tmp_path):
    code, kernel = tmp_path / "code", tmp_path / "kernel"
    code.write_bytes(CODE)
    kernel.write_bytes(b"a kernel")
    targets = (tiny.target(name="one"), tiny.target(name="two"))
    alike = tiny.write(tmp_path / "alike.pt2", {"a.so": code, "sub/k.cubin": kernel}, targets=targets, cases=())
    renamed = tiny.write(tmp_path / "renamed.pt2", {"b.so": code, "sub/k.cubin": kernel}, cases=())
    folders = []
    for package in (alike, renamed):
        with PackageReader(package) as reader:
            for target in reader.manifest.targets:
                with unpack(reader, target_contents(reader, target), again=False) as entry:
                    folders.append(entry.folder)
                    assert (entry.folder / "sub" / "k.cubin").read_bytes() == b"a kernel"
    assert folders[0] == folders[1] != folders[2]


# --- what counts as verified ------------------------------------------------------------------------------------------


def test_what_was_unpacked_is_not_read_again_unless_that_is_asked_for(reader, library, hashed):
    unpacked(reader, library)
    assert hashed == []
    unpacked(reader, library)
    assert hashed == []
    unpacked(reader, library, again=True)
    assert len(hashed) == 1


def test_a_byte_that_was_changed_is_found_though_size_and_time_are_restored(reader, library):
    path = unpacked(reader, library)
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert unpacked(reader, library).read_bytes() == CONTENT


def test_another_file_in_its_place_is_found_though_its_time_is_the_same(reader, library, tmp_path):
    path = unpacked(reader, library)
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(CONTENT[:-1] + b"!")
    other.chmod(0o600)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert unpacked(reader, library).read_bytes() == CONTENT


def rewritten(path: Path, change) -> None:
    """The record beside an unpacked file, changed."""
    record = path.with_name(VERIFIED)
    document = json.loads(record.read_bytes())
    change(document)
    record.write_text(json.dumps(document))


def not_older_than_the_file(document):
    document["checked_ns"] = document["files"]["libtoy.so"]["state"]["ctime_ns"]


def from_the_future(document):
    document["checked_ns"] += 3600 * 10**9


def of_another_content(document):
    document["files"]["libtoy.so"]["sha256"] = "0" * 64


def of_another_file(document):
    document["files"] = {"other.so": document["files"]["libtoy.so"]}


def with_another_key(document):
    document["trusted"] = True


@pytest.mark.parametrize(
    "change", [not_older_than_the_file, from_the_future, of_another_content, of_another_file, with_another_key]
)
def test_a_record_that_does_not_prove_it_counts_for_nothing(reader, library, hashed, change):
    path = unpacked(reader, library)
    rewritten(path, change)
    assert unpacked(reader, library) == path
    assert len(hashed) == 1
    unpacked(reader, library)
    assert len(hashed) == 1, "there is a good record again"


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_each_part_of_a_files_state_counts(reader, library, hashed, field):
    def other(document):
        document["files"]["libtoy.so"]["state"][field] -= 1

    rewritten(unpacked(reader, library), other)
    unpacked(reader, library)
    assert len(hashed) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"checked_ns": 1}', b'{"checked_ns": "1", "files": {}}']
)
def test_a_record_that_is_none_counts_for_nothing(reader, library, hashed, content):
    unpacked(reader, library).with_name(VERIFIED).write_bytes(content)
    unpacked(reader, library)
    assert len(hashed) == 1


def test_a_record_that_others_may_have_written_counts_for_nothing(reader, library, hashed, tmp_path):
    record = unpacked(reader, library).with_name(VERIFIED)
    record.chmod(0o666)
    unpacked(reader, library)
    assert len(hashed) == 1
    record.rename(tmp_path / "record")
    record.symlink_to(tmp_path / "record")
    unpacked(reader, library)
    assert len(hashed) == 2
    record.unlink()
    os.mkfifo(record)
    unpacked(reader, library)
    assert len(hashed) == 3


def test_a_record_younger_than_all_files_is_waited_for(monkeypatch):
    """The clock of file systems stands still for milliseconds; what changed in the same tick could be changed again."""
    times = iter([5, 10, 11, 12])
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", lambda fd: None)
        patch.setattr(os, "fstat", lambda fd: os.stat_result([0] * 10, {"st_mtime_ns": next(times)}))
        assert trust._time_after(10, -1) == 11


def test_an_unusable_record_is_no_reason_to_fail(reader, library, hashed):
    path = unpacked(reader, library)
    path.with_name(VERIFIED).unlink()
    path.with_name(VERIFIED).mkdir()  # in the place of the record, which then cannot be written
    assert unpacked(reader, library) == path
    assert len(hashed) == 1
