"""The built libraries ask torch for the stable ABI of 2.11 only, and a host for little."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile

from exportkit import arr_coc
from exportkit.libraries import LIBRARY_DIR
from exportkit.package import elf
from exportkit.runtime.native import library_path
from tests import built

ROOT = Path(__file__).parents[2]
# The operators, the reader, and the C++ runtime for this torch, with its program and the backend of Triton.
BUILT = {*library_path().parent.rglob("*"), *LIBRARY_DIR.with_name("bin").glob("*")}
RUNTIME = {*LIBRARY_DIR.glob("*.so"), *filter(Path.is_file, BUILT)}
DATA = library_path().with_name("libexportkit_no_python.so")  # asks for nothing
SHIPPED = sorted({*RUNTIME, *arr_coc.LIBRARIES.values(), *filter(Path.exists, [built.CHECKED])} - {DATA})

# What a host of 2024 has (Ubuntu 24.04): a library that was built on a newer one does not load there.
NEWEST_GLIBC, NEWEST_GLIBCXX = (2, 38), (3, 4, 32)


@pytest.fixture(params=["cpu", pytest.param("cuda", id="cuda-library")])
def library(request: pytest.FixtureRequest) -> elf.Elf:
    """Each of our operator libraries."""
    return elf.read_elf(built.operator_library(request.param))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_nothing_walks_folders_by_a_libstdcxx_that_libtorch_may_replace(path: Path):
    # libtorch exports std::filesystem of the libstdc++ it was built with: an iterator of a newer one crashes in it.
    walking = re.compile("directory_iterator|10remove_all")
    assert not [symbol for symbol in elf.read_elf(path).undefined if walking.search(symbol)]


def test_every_torch_symbol_is_one_that_torch_2_11_exports(library: elf.Elf):
    assert library.torch_symbols
    assert sorted(library.torch_symbols - elf.stable_abi()) == []
    assert library.registers_operators


def test_no_library_is_needed_that_a_host_may_lack(library: elf.Elf):
    """The CUDA runtime is inside: a host has that of CUDA 12 or of 13, or only its torch's."""
    assert not [name for name in library.needed if name.startswith(("libcuda", "libc10", "libtorch_cuda"))]
    others = [need for need in library.host_needs if not need.startswith(("GLIBC_", "GLIBCXX_"))]
    assert others == (["libtorch_cuda.so"] if library.needs_torch_cuda else [])


def test_the_installed_torch_has_every_shim_of_the_list():
    """Shims are promised to stay for two years; a torch that drops one is one that `needs_torch` is wrong about."""
    exported = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch.so"))
    missing = sorted(name for name in elf.stable_abi() if not hasattr(exported, name))
    if torch.version.cuda is None:
        missing = [name for name in missing if "cuda" not in name]
    assert missing == []


def test_the_reader_of_packages_needs_neither_torch_nor_python_nor_openssl():
    reader = elf.read_elf(LIBRARY_DIR / "libexportkit_package.so")
    assert not [name for name in reader.needed if not re.match(r"(lib(c|m|stdc\+\+|gcc_s)|ld-linux.*)\.so", name)]
    assert not reader.torch_symbols
    assert not [name for name in reader.undefined if name.startswith(("Py", "_Py", "EVP_"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_what_is_shipped_asks_for_no_newer_host_than_it_must(path: Path):
    library = elf.read_elf(path)
    assert library.glibc is not None
    assert tuple(map(int, library.glibc.split("."))) <= NEWEST_GLIBC
    assert library.glibcxx is None or tuple(map(int, library.glibcxx.split("."))) <= NEWEST_GLIBCXX
    assert not library.static_libstdcxx
    assert not [name for name in library.needed if re.match(r"lib(cudart|python|torch_python)\b", name)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_what_is_shipped_names_no_folder_of_the_build_and_runs_no_stack(path: Path):
    with open(path, "rb") as file:
        shared = ELFFile(file)
        dynamic = list(shared.get_section_by_name(".dynamic").iter_tags())
        segments = [segment.header for segment in shared.iter_segments()]
    assert dynamic
    assert not {"DT_RPATH", "DT_TEXTREL"} & {tag.entry.d_tag for tag in dynamic}
    # Only the C++ runtime looks for others: the reader of packages, and torch beside it or in a development tree.
    runpath = [tag.runpath for tag in dynamic if tag.entry.d_tag == "DT_RUNPATH"]
    assert len(runpath) == path.is_relative_to(library_path().parent)
    torchs = str(Path(torch.__file__).parent / "lib")
    folders = [folder for found in runpath for folder in found.split(":")]
    assert [folder for folder in folders if folder.split("/")[0] != "$ORIGIN" and folder != torchs] == []
    for folder in folders:  # none leaves the folder in which packages lie beside each other
        where = Path(os.path.normpath(folder.replace("$ORIGIN", str(path.parent))))
        assert folder == torchs or where.is_relative_to(ROOT)
    # Without the first, or with an executable one, glibc 2.41 refuses to open the library.
    assert [header.p_flags & 1 for header in segments if header.p_type == "PT_GNU_STACK"] == [0]
    assert not [header for header in segments if header.p_type == "PT_LOAD" and header.p_flags & 3 == 3]
    content = path.read_bytes()
    for found in runpath:
        content = content.replace(found.encode(), b"")
    assert str(ROOT).encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content


def test_sources_of_operators_use_macros_that_the_headers_of_2_11_have():
    """With newer headers, what 2.11 lacks compiles: read off torch/csrc/stable and torch/headeronly of 2.11."""
    known = {"STABLE_TORCH_LIBRARY", "STABLE_TORCH_LIBRARY_FRAGMENT", "STABLE_TORCH_LIBRARY_IMPL", "STD_TORCH_CHECK"}
    known |= {"STD_TORCH_CHECK_MSG", "TORCH_ABI_VERSION", "TORCH_BOX", "TORCH_ERROR_CODE_CHECK", "TORCH_SUCCESS"}
    files = [*ROOT.glob("csrc/**/*"), *ROOT.glob("examples/**/*")]
    sources = [path for path in files if path.suffix in {".cpp", ".cu", ".h", ".cuh"}]
    sources = [path for path in sources if "torch/csrc/stable" in path.read_text()]
    assert len(sources) > 10
    for path in sources:
        used = set(re.findall(r"\b(?:STABLE_|STD_)?TORCH_[A-Z_]+\b(?=\()|\bTORCH_ABI_VERSION\b", path.read_text()))
        assert used <= known, f"{path.relative_to(ROOT)}: {used - known}"
