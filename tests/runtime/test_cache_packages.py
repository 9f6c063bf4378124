"""A package is hashed once, and again whenever what the file system says leaves a doubt."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import exportkit
from exportkit.errors import DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import cache_directory
from tests.runtime import tiny
from tests.runtime.caches import Cache

SECOND = 10**9


Hashes = Callable[..., bool]


@pytest.fixture
def clock(cache: Cache) -> Callable[[float], None]:
    """Sets the system's clock ahead by so many seconds, or back."""
    return lambda seconds: cache.set_clock(int(seconds * SECOND))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tiny.write_code(tmp_path / "package.pt2")


@pytest.fixture
def hashes(package: Path, cache: Cache) -> Hashes:
    """Whether verifying the package reads it; raises what that finds."""
    return lambda path=package, *, always=False: cache.verify(path, always=always)


def change_a_byte(package: Path) -> None:
    """A second time, it is right again."""
    with PackageReader(package) as reader:
        at = reader.data_offset("data/aotinductor/cpu/a.so") + 50
    with open(package, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_a_package_that_was_not_right_is_never_remembered(hashes, clock, package):
    change_a_byte(package)
    clock(3)
    for _ in range(2):
        with pytest.raises(DigestMismatchError, match=r"a\.so"):
            hashes()


def test_a_package_that_was_just_written_is_hashed_until_it_is_two_seconds_old(hashes, package, cache):
    written_ns = package.stat().st_ctime_ns
    for age, expected in [(0, True), (2 * SECOND - 1, True), (2 * SECOND, True), (2 * SECOND, False)]:
        cache.stop_clock(written_ns + age)
        assert hashes() is expected


@pytest.mark.parametrize("now_ns", [None, 0, 4102444800 * SECOND], ids=["right", "1970", "2100"])
def test_a_change_is_found_though_size_and_time_are_restored(hashes, clock, cache, package, now_ns):
    """And though the clock is decades off."""
    clock(3) if now_ns is None else cache.stop_clock(now_ns)
    assert hashes()
    hashes()
    before = package.stat()
    change_a_byte(package)
    os.utime(package, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (package.stat().st_size, package.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(DigestMismatchError, match=r"a\.so"):
        hashes()


def test_a_time_in_the_future_is_not_relied_on(hashes, clock, package):
    ahead = time.time_ns() + 3600 * SECOND
    os.utime(package, ns=(ahead, ahead))
    clock(10)
    assert hashes()
    assert hashes()
    clock(3700)
    assert hashes()
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


def test_a_package_that_changes_while_it_is_hashed_is_not_remembered(hashes, clock, tmp_path):
    package = tiny.write_code(tmp_path / "large.pt2", bytes(1 << 26))  # many ticks of the file system's clock
    clock(3)
    over = threading.Event()

    def change() -> None:
        while not over.wait(0.0005):
            os.utime(package)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        assert hashes(package)
    finally:
        over.set()
        changing.join()
    clock(6)
    assert hashes(package)
    assert not hashes(package)


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


def bytes_read() -> int:
    """By this process, ever, mapped memory apart."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_second_load_reads_nothing_of_the_size_of_its_contents(tiny_files, tmp_path):
    """Unless it is told to hash everything again. What is counted is what the process reads."""
    large = 1 << 24
    extra = {"data/weights/large.bin": os.urandom(large)}
    package = tiny.write(tmp_path / "large.pt2", tiny_files, extra=extra, cases=())
    time.sleep(max(0.0, package.stat().st_ctime + 2.1 - time.time()))  # until its times can be relied on
    args, kwargs = tiny.example()
    hashed = []
    for how in ("once", "once", "always", "once"):
        before = bytes_read()
        with exportkit.load(package, verify=how) as model:
            hashed.append(bytes_read() - before > large // 2)
            assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)
    assert hashed == [True, False, True, False]
