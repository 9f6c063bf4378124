"""A package is hashed once, and again whenever what the file system says leaves a doubt."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

import exportkit
from exportkit.errors import DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import cache_directory
from exportkit.runtime.cache.trust import verify_package
from tests.runtime import tiny

SECOND = 10**9


@pytest.fixture
def clock(monkeypatch):
    """Sets the system's clock ahead by so many seconds, or back."""
    real = time.time_ns

    def set_ahead(seconds: float) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: real() + int(seconds * SECOND))

    return set_ahead


@pytest.fixture
def package(tmp_path: Path) -> Path:
    code = tmp_path / "model.so"
    code.write_bytes(b"\x7fELF compiled code" * 100)
    return tiny.write(tmp_path / "package.pt2", {"a.so": code}, cases=())


@pytest.fixture
def hashes(package, monkeypatch):
    """Whether verifying the package reads it; raises what that finds."""
    read: list[PackageReader] = []
    verify = PackageReader.verify

    def recorded(self: PackageReader) -> None:
        read.append(self)
        verify(self)

    monkeypatch.setattr(PackageReader, "verify", recorded)

    def check(path: Path = package, *, again: bool = False) -> bool:
        read.clear()
        with PackageReader(path) as reader:
            verify_package(reader, again=again)
        return bool(read)

    return check


def change_a_byte(package: Path) -> None:
    with PackageReader(package) as reader:
        at = reader.data_offset("data/aotinductor/cpu/a.so") + 50
    with open(package, "r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def test_a_package_is_hashed_once_and_again_when_asked(hashes, clock):
    clock(3)
    assert hashes()
    assert not hashes()
    assert hashes(again=True)
    assert not hashes()


def test_a_change_is_found_though_size_and_time_are_restored(hashes, clock, package):
    clock(3)
    assert hashes()
    before = package.stat()
    change_a_byte(package)
    os.utime(package, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (package.stat().st_size, package.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(DigestMismatchError, match=r"a\.so"):
        hashes()


def test_a_package_that_was_not_right_is_never_remembered(hashes, clock, package):
    change_a_byte(package)
    clock(3)
    for _ in range(2):
        with pytest.raises(DigestMismatchError, match=r"a\.so"):
            hashes()


def test_another_package_in_its_place_is_hashed_and_the_moved_one_is_not(hashes, clock, package):
    clock(3)
    assert hashes()
    moved = package.with_name("moved.pt2")
    shutil.copy2(package, moved.with_suffix(".copy"))
    package.rename(moved)  # sets the change time
    moved.with_suffix(".copy").rename(package)
    assert hashes(package)
    assert hashes(moved)
    assert not hashes(package)
    assert not hashes(moved)


def test_a_package_that_was_just_written_is_hashed_until_it_is_two_seconds_old(hashes, package, monkeypatch):
    written_ns = package.stat().st_ctime_ns
    for age, expected in [(0, True), (2 * SECOND - 1, True), (2 * SECOND, True), (2 * SECOND, False)]:
        monkeypatch.setattr(time, "time_ns", lambda age=age: written_ns + age)
        assert hashes() is expected


def test_a_time_in_the_future_is_not_relied_on(hashes, clock, package):
    ahead = time.time_ns() + 3600 * SECOND
    os.utime(package, ns=(ahead, ahead))
    clock(10)
    assert hashes()
    assert hashes()
    clock(3700)
    assert hashes()
    assert not hashes()


def test_a_verification_in_the_future_counts_for_nothing(hashes, clock):
    clock(3600)
    assert hashes()
    clock(0)  # it was set right, or back: nobody knows
    assert hashes()
    clock(3700)
    assert not hashes()


def test_a_package_that_others_may_write_to_is_always_hashed(hashes, clock, package):
    clock(3)
    package.chmod(0o664)
    assert hashes()
    assert hashes()
    package.chmod(0o644)
    assert hashes()
    assert not hashes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_package_of_another_user_is_always_hashed(hashes, clock, package):
    clock(3)
    os.chown(package, 12345, -1)
    assert hashes()
    assert hashes()


def test_a_package_that_changes_while_it_is_hashed_is_not_remembered(hashes, clock, package, monkeypatch):
    clock(3)
    verify = PackageReader.verify

    def meanwhile(self: PackageReader) -> None:
        verify(self)
        os.utime(package)

    monkeypatch.setattr(PackageReader, "verify", meanwhile)
    assert hashes()
    assert hashes()


def test_nothing_is_remembered_in_a_cache_that_others_may_write_to(hashes, clock):
    clock(3)
    assert hashes()
    assert not hashes()
    cache_directory().chmod(0o777)
    assert hashes()
    cache_directory().chmod(0o700)
    (cache_directory() / "packages").chmod(0o777)
    assert hashes()


def test_the_record_of_one_manifest_is_none_of_another(hashes, clock, package):
    clock(3)
    assert hashes()
    (record,) = (cache_directory() / "packages").iterdir()
    with PackageReader(package) as reader:
        record.write_text(record.read_text().replace(reader.manifest_sha256, "0" * 64))
    assert hashes()


def test_load_hashes_once_and_with_verify_always_each_time(tiny_package, clock, monkeypatch):
    read: list[str] = []
    verify = PackageReader.verify
    monkeypatch.setattr(PackageReader, "verify", lambda self: (read.append("package"), verify(self)))
    clock(3)
    for how, expected in [("once", ["package"]), ("once", []), ("always", ["package"]), ("once", [])]:
        read.clear()
        with exportkit.load(tiny_package, verify=how) as model:
            args, kwargs = tiny.example()
            assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)
        assert read == expected


def test_a_second_load_reads_nothing_of_the_size_of_its_contents(tiny_files, tmp_path, clock, monkeypatch):
    """Weights would be mapped: what is counted is what the process reads."""
    import exportkit.package.archive as archive
    import exportkit.package.container as container

    package = tiny.write(
        tmp_path / "large.pt2", tiny_files, extra={"data/weights/large.bin": os.urandom(1 << 24)}, cases=()
    )
    clock(3)
    exportkit.load(package).close()
    total = 0
    pread = container.pread

    def counting(fd: int, offset: int, size: int) -> bytes:
        nonlocal total
        data = pread(fd, offset, size)
        total += len(data)
        return data

    for module in (archive, container):
        monkeypatch.setattr(module, "pread", counting)
    exportkit.load(package).close()
    assert 0 < total < 1 << 16
