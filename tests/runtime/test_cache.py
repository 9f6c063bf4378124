"""What packages are unpacked to: once, whole, and only where nobody else can exchange it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exportkit.errors import DigestMismatchError
from exportkit.runtime.cache import cache_directory
from tests.runtime import tiny
from tests.runtime.caches import Cache

CONTENT = b"\x7fELF a library" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CODE = b"\x7fELF compiled code"
VERIFIED = "~verified.json"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    library = tiny.library(CONTENT)
    changes = {"extra": {library.record: CONTENT}, "libraries": (library,)}
    return tiny.write_code(tmp_path / "toy.pt2", CODE, record="a.wrapper.so", **changes)


Unpacked = Callable[..., Path]


@pytest.fixture
def unpacked(cache: Cache, package: Path) -> Unpacked:
    """Unpacks the package's library, and gives its file."""
    return lambda *, always=False: cache.unpack(package, "library", always=always) / "libtoy.so"


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


def test_a_library_is_unpacked_once_under_its_digest_for_its_user_alone(unpacked):
    path = unpacked()
    assert path == cache_directory() / "libraries" / SHA256 / "libtoy.so"
    assert path.read_bytes() == CONTENT
    for private in (path, path.parent, path.parent.parent, cache_directory()):
        assert stat.S_IMODE(private.stat().st_mode) & 0o077 == 0
    before = path.stat()
    assert unpacked() == path
    assert path.stat().st_ino == before.st_ino
    assert {entry.name for entry in path.parent.iterdir()} == {"libtoy.so", "~verified.json", "~lock"}


def one_byte(path: Path) -> None:
    """Changes a byte, and restores the size and the time."""
    before = path.stat()
    path.write_bytes(CONTENT[:500] + b"\xff" + CONTENT[501:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def as_link(path: Path) -> None:
    """To what is right today; its owner may change it after it was checked."""
    path.rename(path.parents[3] / "elsewhere.so")
    path.symlink_to(path.parents[3] / "elsewhere.so")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "exchange",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.write_bytes(b"\x7fELF something else"),
        lambda path: path.chmod(0o666),  # injected while the directory was open, say; its content is right, so far
        one_byte,
        as_link,
        as_pipe,
    ],
)
def test_what_may_not_be_the_file_is_replaced_by_it(unpacked, exchange):
    exchange(unpacked())
    path = unpacked()
    assert stat.S_ISREG(path.lstat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == CONTENT


def link_in(cache: Path) -> None:
    (cache / "libraries").symlink_to(cache.parent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cache: cache.chmod(0o777), r"exportkit-cache \(it may be written to by other users"),
        pytest.param(
            lambda cache: os.chown(cache, 12345, -1),
            "it belongs to another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away"),
        ),
        (link_in, "it is a link"),
    ],
)
def test_a_cache_that_others_may_write_to_is_not_used(unpacked, change, said):
    cache_directory().mkdir(mode=0o700)
    change(cache_directory())
    before = list(cache_directory().parent.iterdir())
    with pytest.warns(RuntimeWarning, match=rf"cannot use its cache .*{said}"):
        path = unpacked()
    assert cache_directory() not in path.parents
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.parent.parent.parent.stat().st_mode) == 0o700
    assert list(cache_directory().parent.iterdir()) == before


def test_a_cache_that_cannot_be_made_is_replaced_by_a_temporary_one(unpacked, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="Set EXPORTKIT_CACHE to a private, writable directory"):
        first = unpacked()
    with pytest.warns(RuntimeWarning):
        assert unpacked() == first


def test_a_record_that_does_not_hold_is_never_unpacked(package, unpacked):
    at = package.read_bytes().find(CONTENT)
    with open(package, "r+b") as file:
        file.seek(at + 100)
        file.write(b"\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DigestMismatchError, match="libtoy"):
            unpacked()
    assert [path.name for path in (cache_directory() / "libraries" / SHA256).iterdir()] == ["~lock"]


def test_a_link_to_the_cache_is_followed_once_and_its_target_must_be_private(unpacked, monkeypatch, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    monkeypatch.setenv("EXPORTKIT_CACHE", str(link))
    assert unpacked().is_relative_to(real), "the path that is loaded goes by no link"
    real.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="it may be written to by other users"):
        unpacked()


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_is_unpacked_under_the_digest_of_what_sha256sum_would_print(cache, package):
    line = f"{hashlib.sha256(CODE).hexdigest()}  a.wrapper.so\n"
    for _ in range(2):
        folder = cache.unpack(package, "target")
        assert folder == cache_directory() / "targets" / hashlib.sha256(line.encode()).hexdigest()
        assert (folder / "a.wrapper.so").read_bytes() == CODE
        assert stat.S_IMODE((folder / "a.wrapper.so").stat().st_mode) == 0o600


def test_targets_of_the_same_files_share_an_entry_and_others_do_not(cache, tmp_path):
    code, kernel = tmp_path / "code", tmp_path / "kernel"
    code.write_bytes(CODE)
    kernel.write_bytes(b"a kernel")
    targets = (tiny.target(name="one"), tiny.target(name="two"))
    alike = tiny.write(tmp_path / "alike.pt2", {"a.so": code, "sub/k.cubin": kernel}, targets=targets, cases=())
    renamed = tiny.write(tmp_path / "renamed.pt2", {"b.so": code, "sub/k.cubin": kernel}, cases=())
    folders = [cache.unpack(package, "target", index) for package, index in ((alike, 0), (alike, 1), (renamed, 0))]
    assert all((folder / "sub" / "k.cubin").read_bytes() == b"a kernel" for folder in folders)
    assert folders[0] == folders[1] != folders[2]


# --- what counts as verified ------------------------------------------------------------------------------------------


class Remembered(NamedTuple):
    """What was verified once, and whether it is hashed when it is asked for again."""

    record: Path
    hashed: Callable[[], bool]

    def rewrite(self, change: Callable[[Any], Any]) -> None:
        """Changes the record's document, or puts another in its place."""
        document = json.loads(self.record.read_bytes())
        changed = change(document)
        self.record.write_text(json.dumps(document if changed is None else changed))


@pytest.fixture(params=["library", "package"])
def remembered(request: pytest.FixtureRequest, cache: Cache, package: Path, unpacked: Unpacked) -> Remembered:
    cache.set_clock(3 * 10**9)  # from two seconds on, a file's times can be relied on
    if request.param == "package":
        assert cache.verify(package)
        (record,) = (cache_directory() / "packages").iterdir()
        return Remembered(record, lambda: cache.verify(package))
    record = unpacked().with_name(VERIFIED)

    def identity() -> tuple[int, bytes] | None:
        return (record.stat().st_ino, record.read_bytes()) if record.is_file() and not record.is_symlink() else None

    def hashed() -> bool:
        """Then there is another record of it."""
        before = identity()
        unpacked()
        return identity() != before

    return Remembered(record, hashed)


def state_in(document: dict[str, Any]) -> dict[str, int]:
    return (document if "state" in document else document["files"]["libtoy.so"])["state"]


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_each_part_of_a_files_state_counts(remembered, field):
    remembered.rewrite(lambda document: state_in(document).update({field: state_in(document)[field] - 1}))
    assert remembered.hashed()
    assert not remembered.hashed()


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(checked_ns=document["checked_ns"] + 3600 * 10**9),  # in the future
        lambda document: document.update(checked_ns=str(document["checked_ns"])),
        lambda document: document.update(surprise=1),
        lambda document: document.pop("checked_ns") and None,
        lambda document: state_in(document).update(mode=0o600),
        lambda document: [document],
        lambda document: [],
        lambda document: {"checked_ns": 1},
    ],
)
def test_a_record_that_does_not_prove_it_counts_for_nothing(remembered, change):
    remembered.rewrite(change)
    assert remembered.hashed()
    assert not remembered.hashed(), "there is a good record again"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_record_that_is_no_json_counts_for_nothing(remembered, content):
    remembered.record.write_bytes(content)
    assert remembered.hashed()


def test_a_record_that_others_may_have_written_counts_for_nothing(remembered, tmp_path):
    record = remembered.record
    record.chmod(0o666)
    assert remembered.hashed()
    record.rename(tmp_path / "record")
    record.symlink_to(tmp_path / "record")
    assert remembered.hashed()
    record.unlink()
    os.mkfifo(record)
    assert remembered.hashed()


@pytest.mark.parametrize("remembered", ["library"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(checked_ns=state_in(document)["ctime_ns"]),  # when the file was changed
        lambda document: document["files"]["libtoy.so"].update(sha256="0" * 64),
        lambda document: document.update(files={"other.so": document["files"]["libtoy.so"]}),
    ],
)
def test_a_record_of_another_time_content_or_file_counts_for_nothing(remembered, change):
    remembered.rewrite(change)
    assert remembered.hashed()


def test_an_unusable_record_is_no_reason_to_fail(unpacked):
    path = unpacked()
    path.with_name(VERIFIED).unlink()
    path.with_name(VERIFIED).mkdir()  # in the place of the record, which then cannot be written
    assert unpacked() == path
    path.write_bytes(b"damaged")
    assert unpacked().read_bytes() == CONTENT, "without a record it is hashed each time"
