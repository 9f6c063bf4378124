"""One cache, many processes: they share, they do not get into each other's way, and killed ones do no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exportkit.runtime.cache import cache_directory
from exportkit.runtime.cache.prune import cache_items
from tests.package import c_library
from tests.runtime import tiny
from tests.subprocesses import ROOT, killed_in_the_middle, run_python

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

# Unpacks without torch, and says which file it found.
UNPACK = """
import json, sys
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import unpack_target
sys.stdin.readline()
with PackageReader(sys.argv[1]) as reader:
    file = unpack_target(reader, reader.manifest.targets[0], "forward", always=False).library
    print(json.dumps([file.stat().st_ino, file.read_bytes() == bytes(range(256)) * 40000]))
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
    code = tmp_path / "a.so"
    code.write_bytes(bytes(range(256)) * 40000)
    return tiny.write(tmp_path / "package.pt2", {"a.so": code}, cases=())


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


def test_processes_that_unpack_at_once_write_one_file(package):
    processes = [started(UNPACK, package) for _ in range(20)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [json.loads(process.communicate()[0]) for process in processes]
    assert len({inode for inode, _ in said}) == 1, "all found the file that the first one wrote"
    assert all(right for _, right in said)
    assert cache_files() == {"a.so", "~verified.json", "~lock"}


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
