"""Packages that bring the same operators into one process: one file serves them all, a second build is refused.

tests/test_libraries.py has what is refused in every way that a build comes into a process.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.artifacts import packaged
from tests.fixtures import softpool_library
from tests.runtime import tiny
from tests.runtime.test_loader import PEAKS, POOL, RECORD
from tests.subprocesses import run_python

PRELUDE = """
import os, sys, threading, torch, exportkit
from exportkit.errors import ExportkitError, LibraryConflictError, LibraryLoadError, SchemaChangedError

def refused(error, path):
    try:
        exportkit.load(path)
    except error as caught:
        return f"{type(caught).__name__}: {caught}"
    raise AssertionError(f"{path} was not refused")

def check(model):
    for case in model.cases:
        torch.testing.assert_close(tuple(model(*case.args, **case.kwargs)), tuple(case.outputs))
    assert len(model.cases) > 0

def alive():
    assert torch.ops.softpool.pool(torch.ones(1, 2, 3), torch.zeros(1, 2)).tolist() == [[1.0, 1.0, 1.0]]
    print("alive")

def mapped(word):
    return {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if word in line}
"""


@pytest.fixture(scope="session")
def renamed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another package with the very library of the first, under another name."""
    folder = tmp_path_factory.mktemp("renamed")
    copy = folder / "libpooling_renamed.so"
    shutil.copy(softpool_library.build(), copy)
    packaged("softpool", folder / "renamed.pt2", copy, name="renamed")
    return folder / "renamed.pt2"


def test_two_packages_with_one_library_share_it(softpool_package, renamed_package, tmp_path):
    code = """
one = exportkit.load(sys.argv[1])
os.environ["EXPORTKIT_CACHE"] = sys.argv[3]
other = exportkit.load(sys.argv[2])
assert (one.manifest.name, other.manifest.name) == ("Classifier", "renamed")
check(one), check(other)
one.close()
check(other)
unpacked = [name for _, _, names in os.walk(sys.argv[3]) for name in names if "libpooling" in name]
print(len(mapped("libsoftpool")), len(mapped("libpooling_renamed")), unpacked)
"""
    assert softpool_package.read_bytes() != renamed_package.read_bytes()
    said = run_python(PRELUDE + code, softpool_package, renamed_package, tmp_path / "another cache", cwd=tmp_path)
    assert said == "1 0 []\n"


@pytest.mark.parametrize("same", [True, False])
def test_threads_that_load_at_once_get_one_build_between_them(softpool_package, misbehaving_package, tmp_path, same):
    code = """
barrier, models, errors = threading.Barrier(8), [], []

def load(path):
    barrier.wait()
    try:
        models.append(exportkit.load(path))
    except LibraryConflictError as error:
        errors.append(str(error))

threads = [threading.Thread(target=load, args=(sys.argv[1 + n % 2],)) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for model in models:
    check(model)
alive()
print(len(models), len(errors), len(set(errors)), len(mapped("libsoftpool")))
"""
    packages = (softpool_package, softpool_package if same else misbehaving_package)
    said = run_python(PRELUDE + code, *packages, cwd=tmp_path)
    assert said == ("alive\n8 0 0 1\n" if same else "alive\n4 4 1 1\n")


@pytest.mark.parametrize("failure", ["linker", "schema", "code"])
def test_a_load_that_failed_half_way_leaves_what_the_next_can_use(
    softpool_package, misbehaving_package, tiny_files, tmp_path, failure
):
    """The libraries that were loaded before it failed stay, since nothing can unload them, and are shared."""
    content = softpool_library.build().read_bytes()
    extra, libraries, operators, files = {RECORD: content}, [tiny.library(content, POOL, PEAKS)], (), dict(tiny_files)
    if failure == "linker":
        text = b"no ELF file" * 100
        libraries.append(tiny.library(text, "zzz::op(Tensor x) -> Tensor", name="libzzz.so"))
        extra[libraries[1].record] = text
    elif failure == "schema":
        libraries = [tiny.library(content, "softpool::pool(Tensor x) -> Tensor", PEAKS)]
        operators = libraries[0].defines[:1]
    else:
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"\x7fELF" + bytes(5000))
        files = {name: broken if name.endswith(".so") else file for name, file in files.items()}
    package = tiny.write(tmp_path / "half.pt2", files, extra=extra, libraries=tuple(libraries), operators=operators)
    code = """
for _ in range(2):
    print(refused(ExportkitError, sys.argv[3]))
check(exportkit.load(sys.argv[1]))
print(refused(LibraryConflictError, sys.argv[2]))
print(refused(ExportkitError, sys.argv[3]))
alive()
"""
    said = run_python(PRELUDE + code, softpool_package, misbehaving_package, package, cwd=tmp_path)
    words = {
        "linker": "the dynamic linker refused libzzz.so",
        "schema": f"registered as {POOL}; the package was made with softpool::pool(Tensor x) -> Tensor",
        "code": "cannot load target cpu of half.pt2",
    }
    assert said.count(words[failure]) == 3
    assert failure != "code" or "EXPORTKIT_CACHE" in said
    assert ("SchemaChangedError: " in said) == (failure == "schema")
    assert f"already registered, by sha256 {hashlib.sha256(content).hexdigest()}" in said
    assert said.endswith("alive\n")
