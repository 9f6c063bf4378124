"""exportkit.h stays what programs were compiled with: its listing, its symbols, its codes, its dialects of C."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from elftools.elf.elffile import ELFFile

from exportkit.runtime.native import library_path
from tests.runtime import c_interface, exportkit_run
from tools import c_abi

RUNTIME = c_abi.RUNTIME


@pytest.fixture(scope="module", autouse=True)
def _compilers():
    if shutil.which("cc") is None or shutil.which("g++") is None:
        pytest.skip("no C compiler to read the header with")
    exportkit_run.require_built()  # it brings DLPack's header


def test_the_listing_of_the_interface_is_that_of_the_header():
    stale = "csrc/runtime/exportkit.abi is stale. If no line changed but for added ones: `python -m tools.c_abi`"
    assert c_abi.listing() == c_abi.LISTING.read_text(), stale


def test_every_function_is_declared_in_one_way_and_throws_nothing():
    declared = re.sub(r"/\*.*?\*/", "", c_abi.HEADER.read_text(), flags=re.DOTALL)
    assert declared.count("\nEXPORTKIT_API ") == len(c_abi.functions()) == declared.count("EXPORTKIT_NOEXCEPT;")


def test_the_library_exports_with_a_version_what_the_header_declares():
    nodes = re.findall(
        r"^(EXPORTKIT_\d+) \{\n(.*?)^\}", (RUNTIME / "exports.map").read_text(), re.MULTILINE | re.DOTALL
    )
    listed = {name: node for node, names in nodes for name in re.findall(r"^ +(exportkit_\w+);$", names, re.MULTILINE)}
    assert sorted(listed) == c_abi.functions()
    assert nodes[-1][0] == f"EXPORTKIT_{c_interface.ABI_VERSION}"
    with library_path().open("rb") as file:
        shared = ELFFile(file)
        versions = shared.get_section_by_name(".gnu.version")
        names = {
            version["vd_ndx"]: next(auxiliaries).name
            for version, auxiliaries in shared.get_section_by_name(".gnu.version_d").iter_versions()
        }
        exported = {}
        for index, symbol in enumerate(shared.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name.startswith("exportkit_"):
                exported[symbol.name] = names[versions.get_symbol(index)["ndx"]]
    assert exported == listed


def test_every_class_of_errors_has_a_code():
    text = (RUNTIME.parent / "package" / "errors.h").read_text()
    classes = re.findall(r'ErrorClass k\w+\{"(\w+)", (\d+)\};', text)
    assert len(classes) > 30
    codes = dict(re.findall(r"^constant (EXPORTKIT_\w*ERROR) = (\d+)$", c_abi.LISTING.read_text(), re.MULTILINE))
    for name, code in classes:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("Exportkit")).upper()
        assert codes[f"EXPORTKIT_{words}"] == code
    assert len(set(codes.values())) == len(codes)


@pytest.mark.parametrize("dialect", ["c99", "c11", "c++11"])
def test_the_header_alone_is_correct_in_every_dialect(dialect):
    compiler = ["g++", "-x", "c++"] if "+" in dialect else ["cc", "-x", "c"]
    flags = f"-std={dialect} -fsyntax-only -pedantic -Wall -Wextra -Werror".split()
    strict = [*compiler, *flags, *c_abi.INCLUDE, "-"]
    program = "#include <exportkit/exportkit.h>\n#include <exportkit/exportkit.h>\n"
    done = subprocess.run(strict, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Another copy of DLPack's header may come first, but not one without DLManagedTensorVersioned.
    old = "#define DLPACK_DLPACK_H_\n#define DLPACK_VERSION 80\n" + program
    done = subprocess.run(strict, input=old, capture_output=True, text=True, check=False)
    assert "exportkit.h needs the dlpack/dlpack.h of DLPack 1" in done.stderr


def test_dlpacks_header_is_installed_as_published_with_its_licence():
    installed = library_path().parents[2] / "include" / "dlpack"
    header = (installed / "dlpack.h").read_text()
    assert "#ifndef DLPACK_DLPACK_H_" in header  # the guard of every copy of it
    assert "TORCH" not in header  # what torch has put around its copy
    assert (installed / "LICENSE").read_text().lstrip().startswith("Apache License")
