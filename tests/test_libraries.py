"""One namespace, one build, once: what would end the process is an error instead."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from exportkit.errors import LibraryLoadError
from exportkit.libraries import (
    TORCH_NAMESPACES,
    file_sha256,
    load_library,
    loaded_library,
    registered_schemas,
    schemas_of,
)
from tests.fixtures.softpool_library import build
from tests.package import c_library
from tests.subprocesses import ROOT, run_interpreter, run_python

PRELUDE = """
import sys
from pathlib import Path
import torch
from exportkit.errors import LibraryConflictError, LibraryLoadError
from exportkit.libraries import load_library, loaded_library, registered_schemas

library, other = map(Path, sys.argv[1:3])

def refused(error, path, **kwargs):
    try:
        load_library(path, **kwargs)
    except error as caught:
        return str(caught)
    raise AssertionError(f"{path} was not refused")
"""


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture
def other(library: Path, tmp_path: Path) -> Path:
    """Another build of the library: it works alike, and its digest is not the same."""
    path = tmp_path / "libother.so"
    path.write_bytes(library.read_bytes() + b"another build")
    return path


def test_a_second_build_of_a_namespace_is_refused_and_the_process_goes_on(library, other, tmp_path):
    code = """
first = load_library(library, defines=["softpool"])
assert first.namespaces == {"softpool"}
assert set(registered_schemas("softpool")) - {"softpool::pool.out"} == {"softpool::pool", "softpool::peaks"}
assert load_library(library) is first
copy = other.with_name("copy.so")
copy.write_bytes(library.read_bytes())
assert load_library(copy, defines=["softpool"]) is first, "the same content is the same library"

told = refused(LibraryConflictError, other, defines=["softpool"])
found_out = refused(LibraryConflictError, other)
assert told == found_out
print(told)
print(torch.ops.softpool.pool(torch.ones(1, 2, 3), torch.zeros(1, 2)).tolist())
"""
    said = run_python(PRELUDE + code, library, other, cwd=tmp_path)
    assert f"`softpool` is already registered, by sha256 {file_sha256(library)} from {library}; libother.so" in said
    assert (
        f"libother.so (sha256 {file_sha256(other)}) defines it too\n"
        "    the same in both: softpool::peaks(Tensor weights, int count) -> (Tensor values, Tensor indices)\n"
        "    the same in both: softpool::pool(Tensor x, Tensor weights, float temperature=1.) -> Tensor\n" in said
    )
    assert "isolate=True" in said
    assert said.endswith("[[1.0, 1.0, 1.0]]\n")


def test_a_library_that_something_else_loaded_is_known_until_its_file_is_replaced(library, other, tmp_path):
    code = """
mine = other.with_name("mine.so")
mine.write_bytes(library.read_bytes())
torch.ops.load_library(mine)
print(refused(LibraryConflictError, other, defines=["softpool"]))
found = load_library(library, defines=["softpool"])
assert found.path == mine, found
assert found.namespaces == {"softpool"}
"""
    said = run_python(PRELUDE + code, library, other, cwd=tmp_path)
    mine = tmp_path / "mine.so"
    assert f"already registered, by sha256 {file_sha256(library)} from {mine} (registered at " in said
    assert "), which exportkit did not load" in said
    code = """
mine = other.with_name("mine.so")
torch.ops.load_library(mine)
other.replace(mine)  # an upgrade: the path has the new build, the process runs the old one
print(refused(LibraryConflictError, mine, defines=["softpool"]))
"""
    said = run_python(PRELUDE + code, library, other, cwd=tmp_path)
    assert "already registered, by code (registered at " in said
    assert "), which exportkit did not load; mine.so (sha256" in said


def test_a_namespace_that_python_registered_is_a_conflict(library, other, tmp_path):
    code = """
torch.library.define("softpool::pool", "(Tensor x) -> Tensor")
print(refused(LibraryConflictError, library, defines=["softpool"]))
print(refused(LibraryConflictError, library))
"""
    said = run_python(PRELUDE + code, library, other, cwd=tmp_path)
    assert said.count("`softpool` is already registered, by code (registered at ") == 2
    assert said.count("registered as softpool::pool(Tensor x) -> Tensor, in this file softpool::pool(Tensor x, Te") == 2
    assert said.count("in this file only: softpool::peaks(Tensor weights, int count)") == 2


def test_a_library_that_was_said_to_define_nothing_is_looked_into(library, other, tmp_path):
    code = """
load_library(library)
print(refused(LibraryConflictError, other, defines=[]))  # as a manifest says of one that only adds kernels
"""
    said = run_python(PRELUDE + code, library, other, cwd=tmp_path)
    assert said.count("`softpool` is already registered, by sha256") == 1


def test_libraries_of_one_name_and_of_different_namespaces_go_together(library, tmp_path):
    code = """
assert load_library(library).namespaces == {"one"}
assert load_library(other).namespaces == {"two"}
assert set(registered_schemas("one")) | set(registered_schemas("two")) == {"one::f", "two::f"}
"""
    files = []
    for namespace in ("one", "two"):
        (tmp_path / namespace).mkdir()
        schema = "f(Tensor x) -> Tensor"
        files.append(c_library.operator_library(tmp_path / namespace, schema, namespace=namespace))
    run_python(PRELUDE + code, *files, cwd=tmp_path)


def test_two_builds_of_a_library_that_adds_kernels_do_not_go_together(tmp_path):
    code = """
load_library(library)
assert load_library(library).namespaces == frozenset()
print(refused(LibraryConflictError, other))
"""
    files = []
    for build_ in ("1", "2"):
        (tmp_path / build_).mkdir()
        files.append(c_library.build(tmp_path / build_, f"int kernels(void) {{ return {build_}; }}"))
    said = run_python(PRELUDE + code, *files, cwd=tmp_path)
    assert f"another build of libtoy_cpu.so is loaded in this process: sha256 {file_sha256(files[0])}" in said
    assert f"this one is sha256 {file_sha256(files[1])}" in said


def test_what_is_no_library_is_refused(tmp_path):
    text = tmp_path / "libtext.so"
    text.write_text("not ELF" * 100)
    with pytest.raises(LibraryLoadError, match=r"the dynamic linker refused libtext\.so: .*invalid ELF header"):
        load_library(text)
    with pytest.raises(LibraryLoadError, match=r"cannot read the operator library .*nothing\.so: No such file"):
        load_library(tmp_path / "nothing.so")


def test_a_library_for_another_torch_is_refused_with_the_reason(tmp_path):
    source = "extern int torch_of_tomorrow; int *address = &torch_of_tomorrow;"
    library = c_library.build(tmp_path, source, name="libtomorrow.so")
    with pytest.raises(LibraryLoadError, match=r"undefined symbol: torch_of_tomorrow\n  .*built for another torch"):
        load_library(library)


def test_schemas_are_found_by_name_with_overload():
    found = schemas_of(["aten::add.Tensor", "aten::relu", "aten::no_such_operator", "aten::relu.no_overload"])
    assert list(found) == ["aten::add.Tensor", "aten::relu"]
    assert found["aten::relu"] == "aten::relu(Tensor self) -> Tensor"
    assert registered_schemas("no_such_namespace") == {}
    assert registered_schemas("aten").items() >= found.items()


def test_a_mapped_file_whose_name_is_no_text_does_no_harm(tmp_path):
    name = os.fsencode(tmp_path) + b"/lib\xff.so"
    with open(name, "wb+") as file:
        file.write(b"code" * 1024)
        file.flush()
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC):
            found = loaded_library(file_sha256(Path(os.fsdecode(name))), 4096)
    assert found is not None
    assert found.path == Path(os.fsdecode(name))


@pytest.mark.slow
def test_torchs_libraries_are_known_where_torch_is_a_link(tmp_path: Path) -> None:
    """uv installs links to one copy, if it is asked to."""
    (tmp_path / "torch").symlink_to(Path(torch.__file__).resolve().parent)
    code = "import torch; from exportkit.libraries import *; print(torch.__file__, *mapped_beside_torch())"
    where, *others = run_interpreter(code, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}").split()
    assert where == f"{tmp_path}/torch/__init__.py"
    assert others
    assert not [path for path in others if Path(path).name.startswith(("libtorch", "libc10"))]


@pytest.mark.slow
def test_the_namespaces_of_torch_are_those_that_it_and_its_compiler_register(tmp_path: Path) -> None:
    """A namespace too few costs a probe process; one too many lets an operator be taken for torch's own."""
    code = """
import torch, torch._inductor.compile_fx
print(*sorted({name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}))
"""
    registered = set(run_python(code, cwd=tmp_path).split())
    only_in_other_builds = {"prepacked"}  # of torch 2.11 for CUDA
    only_in_newer_torch = {"_native", "inductor_prims", "_native_aot", "coor", "flex_gemm", "mempool"}  # than 2.11
    assert registered <= TORCH_NAMESPACES
    assert TORCH_NAMESPACES - registered <= only_in_other_builds | only_in_newer_torch
