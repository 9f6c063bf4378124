"""Pruning takes what was used least recently and what was left over, and never what is in use."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from subprocess import PIPE

import pytest

import exportkit
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import cache_directory, unpack_target
from exportkit.runtime.cache.prune import cache_items, prune
from tests.cpp_reader import program
from tests.package import c_library
from tests.runtime import tiny
from tests.runtime.test_cache_processes import WRITE_SLOWLY
from tests.subprocesses import killed_in_the_middle

SIZE = 100_000
DAY = 86400

UNPACK = """
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import unpack_target
reader = PackageReader(Path(sys.argv[1]))
unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
"""


@pytest.fixture(autouse=True)
def _own_temporary_directory(monkeypatch, tmp_path):
    """What other tests leave in the temporary directory is no business of these."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    made = []
    for number in range(3):
        code = tmp_path / f"{number}.so"
        code.write_bytes(bytes([number]) * SIZE)
        made.append(tiny.write(tmp_path / f"{number}.pt2", {"a.so": code}, cases=()))
    return made


def unpacked(package: Path, *, days_ago: float = 0) -> Path:
    with PackageReader(package) as reader:
        entry = unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
        entry.close()
        then = time.time() - days_ago * DAY
        os.utime(entry.folder, (then, then))
        return entry.folder


def test_an_empty_cache_has_nothing_and_nothing_is_made():
    assert cache_items() == ()
    assert prune(everything=True).removed == ()
    assert not cache_directory().exists()


def test_what_was_used_least_recently_goes_until_the_rest_fits(packages):
    old, oldest, newest = (unpacked(p, days_ago=days) for p, days in zip(packages, (2, 3, 1)))
    assert [item.path for item in cache_items()] == [oldest, old, newest]
    pruned = prune(max_bytes=2 * SIZE + 5000)
    assert [item.path for item in pruned.removed] == [oldest]
    assert [item.path for item in pruned.kept] == [old, newest]
    assert not oldest.exists()
    assert {path.name for path in newest.iterdir()} == {"a.so", "~verified.json", "~lock"}
    assert SIZE < pruned.removed[0].size < SIZE + 2000


def test_what_is_used_again_is_the_youngest(packages):
    first, second = (unpacked(p, days_ago=3 - n) for n, p in enumerate(packages[:2]))
    unpacked(packages[0])
    assert [item.path for item in prune(max_bytes=SIZE + 5000).removed] == [second]
    assert first.exists()


def test_what_was_not_used_for_long_goes(packages):
    old, young = unpacked(packages[0], days_ago=31), unpacked(packages[1], days_ago=29)
    assert [item.path for item in prune(unused_for=30 * DAY).removed] == [old]
    assert young.exists()


def test_a_wrong_clock_makes_nothing_old(packages):
    ahead = unpacked(packages[0], days_ago=-400)
    assert prune(unused_for=30 * DAY).removed == ()
    assert ahead.exists()


def test_records_of_packages_go_when_they_are_old_or_all_goes(packages, cache):
    cache.set_clock(3 * 10**9)
    cache.verify(packages[0])
    (item,) = cache_items()
    assert (item.kind, item.in_use) == ("package", False)
    assert prune(max_bytes=0).removed == ()
    assert prune(unused_for=DAY).removed == ()
    assert prune(everything=True).removed == (item,)
    assert cache_items() == ()


def test_what_is_in_use_stays_until_it_is_not(packages):
    with PackageReader(packages[0]) as reader:
        first, second = (unpack_target(reader, reader.manifest.targets[0], "forward", always=False) for _ in range(2))
        first.close()
        with closing(second):
            for pruned in (prune(everything=True), prune(max_bytes=0), prune(unused_for=-1)):
                assert pruned.removed == ()
                assert [(item.kind, item.in_use) for item in pruned.kept] == [("target", True)]
            assert (second.folder / "a.so").exists()
    assert [item.kind for item in prune(everything=True).removed] == ["target"]


def test_a_loaded_model_keeps_its_files_and_a_closed_one_does_not(tiny_package):
    args, kwargs = tiny.example()
    with exportkit.load(tiny_package) as model:
        assert [item.kind for item in prune(everything=True).kept] == ["target"]
        assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)
    assert prune(everything=True).kept == ()
    with exportkit.load(tiny_package) as model:
        assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)


def test_what_a_killed_process_left_is_removed_and_the_next_load_succeeds(packages, tmp_path):
    slow = c_library.build(tmp_path, WRITE_SLOWLY, name="slow.so")
    for remove in (True, False):
        killed_in_the_middle(UNPACK, packages[0], LD_PRELOAD=str(slow))
        (item,) = cache_items()
        assert (item.kind, item.in_use) == ("leftover", False)
        assert sorted(path.suffix for path in item.path.iterdir()) == ["", ".tmp"]
        if remove:
            assert prune().removed == (item,)
            assert cache_items() == ()
    folder = unpacked(packages[0])
    assert (folder / "a.so").read_bytes() == bytes(SIZE)
    assert {path.name for path in folder.iterdir()} == {"a.so", "~verified.json", "~lock"}


def test_what_was_left_beside_a_good_entry_is_removed_alone(packages):
    folder = unpacked(packages[0])
    (folder / ".a.so.0123456789abcdef.tmp").write_bytes(b"half")
    (folder.parents[1] / "packages").mkdir(mode=0o700)
    (folder.parents[1] / "packages" / ".1-2.json.0123456789abcdef.tmp").write_bytes(b"half")
    assert sorted((item.kind, item.size) for item in prune().removed) == [("leftover", 4), ("leftover", 4)]
    assert {path.name for path in folder.iterdir()} == {"a.so", "~verified.json", "~lock"}


def test_an_entry_without_a_record_is_one_unless_it_is_empty(packages):
    folder = unpacked(packages[0])
    (folder / "~verified.json").unlink()
    assert prune().removed == ()
    assert [item.kind for item in cache_items()] == ["target"]
    (folder / "a.so").unlink()
    assert [item.kind for item in prune().removed] == ["leftover"]
    assert not folder.exists()


def test_directories_that_were_left_in_the_temporary_directory_are_removed(tmp_path):
    left = tmp_path / "temporary" / "exportkit-compile.0123456789abcdef.tmp"
    (left / "sub").mkdir(parents=True)
    (left / "sub" / "file").write_bytes(b"half")
    others = tmp_path / "temporary" / "somebody.0123456789abcdef.tmp"
    others.mkdir()
    (removed,) = prune().removed
    assert (removed.kind, removed.path, removed.size) == ("leftover", left, 4)
    assert others.exists()


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_what_takes_the_caches_place_goes_with_its_process(packages, tmp_path, ends):
    temporary = tmp_path / "temporary"
    process = subprocess.Popen([program("check_cache")], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    for words in (
        ("environment", "EXPORTKIT_CACHE", "/proc/nowhere"),
        ("environment", "TMPDIR", temporary),
        ("unpack", packages[0], "target", 0, "once"),
    ):
        process.stdin.write("\t".join(map(str, words)) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
    assert "unpacking to a temporary directory instead" in said
    (item,) = cache_items()
    assert (item.kind, item.path.parent, item.in_use) == ("leftover", temporary, True)
    assert prune(everything=True).removed == ()
    if ends == "killed":
        process.kill()
    process.communicate()
    assert item.path.exists() == (ends == "killed")
    if ends == "killed":
        assert [removed.path for removed in prune().removed] == [item.path]
        assert list(temporary.iterdir()) == []


def test_what_is_not_ours_is_left_alone(packages, tmp_path):
    folder = unpacked(packages[0])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (folder.parent / "link").symlink_to(elsewhere)
    (cache_directory() / "notes.txt").write_text("mine")
    prune(everything=True)
    assert not folder.exists()
    assert (elsewhere / "file").exists()
    assert (cache_directory() / "notes.txt").exists()
