"""One cache, many processes: they share, and killed ones do no harm. Pruning never takes what is in use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
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
from tests.subprocesses import ROOT, killed_in_the_middle, run_python

SIZE = 100_000
DAY = 86400

# Processes that have torch already, and load at the same moment: each says whether its answers were right.
LOADERS = """
import os, sys
import torch, exportkit
from pathlib import Path
import exportkit.runtime.loader, safetensors.torch
torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imported once, not by every fork
torch.set_num_threads(1)
package, count = sys.argv[1], int(sys.argv[2])
start, go = os.pipe()
children = []
for _ in range(count):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            with exportkit.load(package) as model:
                case = model.cases[0]
                mean = model(*case.args, **case.kwargs)["regions"].mean
            torch.testing.assert_close(mean, case.outputs["regions"].mean, rtol=1e-5, atol=1e-5)
            status = 0
        finally:
            os._exit(status)
    children.append(child)
os.close(go)
print([os.waitpid(child, 0)[1] for child in children].count(0))
"""

UNPACK_AND_USE = """
import sys
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import unpack_target
with PackageReader(sys.argv[1]) as reader:
    for _ in range(60):
        entry = unpack_target(reader, reader.manifest.targets[0], "forward", always=False)
        assert (entry.folder / "a.so").read_bytes() == bytes(range(256)) * 40000
        assert (entry.folder / "~verified.json").exists()
        entry.close()
print("always there")
"""
PRUNE = """
from exportkit.runtime.cache.prune import prune
print("pruning", flush=True)
while True:
    prune(everything=True)
"""

# In the place of libc's: of a library that is being unpacked it writes a little, says so, and waits to be killed.
WRITE_SLOWLY = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
ssize_t write(int fd, const void* data, size_t size) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  readlink(link, path, sizeof path - 1);
  if (strstr(path, ".so.") && strstr(path, ".tmp")) {
    syscall(SYS_write, fd, data, 1000);
    syscall(SYS_write, 1, "now\n", 4);
    for (;;) pause();
  }
  return syscall(SYS_write, fd, data, size);
}
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Of a target of 10 MB."""
    return tiny.write_code(tmp_path / "package.pt2", bytes(range(256)) * 40000)


def cache_files() -> set[str]:
    """Names of the files in the cache, without their folders."""
    return {path.name for path in cache_directory().rglob("*") if path.is_file()}


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_twenty_processes_that_load_first_at_once_share_one_copy(tiny_package, tiny_files, tmp_path):
    assert run_python(LOADERS, tiny_package, 20, cwd=tmp_path, TMPDIR=str(tmp_path)) == "20\n"
    folders = [item.path for item in cache_items() if item.kind == "target"]
    assert len(folders) == 1
    assert {path.name for path in folders[0].iterdir()} == {*tiny_files, "~verified.json", "~lock"}
    assert not [name for name in cache_files() if name.endswith(".tmp")]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("exportkit-cache.", "aotinductor_"))]


def test_what_is_used_is_there_whatever_is_pruned_meanwhile(package):
    pruning = started(PRUNE)
    try:
        assert pruning.stdout is not None
        assert pruning.stdout.readline() == "pruning\n"
        users = [started(UNPACK_AND_USE, package) for _ in range(2)]
        assert [user.communicate()[0] for user in users] == ["always there\n"] * 2
        assert pruning.poll() is None
    finally:
        pruning.kill()
        pruning.communicate()


def test_a_load_that_is_killed_while_it_unpacks_leaves_nothing_that_is_used(tiny_package, tmp_path):
    slow = c_library.build(tmp_path, WRITE_SLOWLY, name="slow.so")
    load = "import exportkit; exportkit.load(sys.argv[1])"
    killed_in_the_middle(load, tiny_package, LD_PRELOAD=str(slow))
    (left,) = cache_directory().rglob("*.tmp")
    assert left.stat().st_size <= 1000
    (item,) = [item for item in cache_items() if item.path == left.parent]
    assert (item.kind, item.in_use) == ("leftover", False)
    assert run_python(LOADERS, tiny_package, 1, cwd=tiny_package.parent) == "1\n"
    assert not left.exists()


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_temporary_directory(monkeypatch, tmp_path):
    """What other tests leave in the temporary directory is no business of these."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    return [tiny.write_code(tmp_path / f"{number}.pt2", bytes([number]) * SIZE) for number in range(3)]


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
    unpacked(packages[1])  # what is used again is the youngest
    pruned = prune(max_bytes=2 * SIZE + 5000)
    assert [item.path for item in pruned.removed] == [old]
    assert [item.path for item in pruned.kept] == [newest, oldest]
    assert not old.exists()
    assert {path.name for path in newest.iterdir()} == {"a.so", "~verified.json", "~lock"}
    assert SIZE < pruned.removed[0].size < SIZE + 2000


def test_what_was_not_used_for_long_goes_and_a_wrong_clock_makes_nothing_old(packages):
    old, young, ahead = (unpacked(package, days_ago=days) for package, days in zip(packages, (31, 29, -400)))
    assert [item.path for item in prune(unused_for=30 * DAY).removed] == [old]
    assert young.exists()
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


def test_a_loaded_model_keeps_its_files_and_a_closed_one_does_not(tiny_package):
    args, kwargs = tiny.example()
    for _ in range(2):
        with exportkit.load(tiny_package) as model:
            exportkit.load(tiny_package).close()  # who uses the same files ends
            for pruned in (prune(everything=True), prune(max_bytes=0), prune(unused_for=-1)):
                assert "target" not in {item.kind for item in pruned.removed}
                assert [(item.kind, item.in_use) for item in pruned.kept] == [("target", True)]
            assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)
        assert [item.kind for item in prune(everything=True).removed] == ["target"]


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
