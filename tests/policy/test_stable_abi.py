"""The built libraries ask torch for the stable ABI of 2.11 and nothing else, and the wheel says so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from exportkit.libraries import built_in_libraries
from exportkit.package import elf

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["cpu", pytest.param("cuda", id="cuda-library")])
def library(request: pytest.FixtureRequest) -> elf.Elf:
    """Each of our operator libraries. The CPU one is always built."""
    built = built_in_libraries()
    if request.param == "cuda" and "cuda" not in built:
        pytest.skip("built without CUDA")
    return elf.read_elf(built[request.param])


def test_no_symbol_is_c_plus_plus_of_torch(library: elf.Elf):
    assert elf.is_stable(library.undefined)


def test_every_torch_symbol_is_one_that_torch_2_11_exports(library: elf.Elf):
    assert library.torch_symbols
    assert sorted(library.torch_symbols - elf.stable_abi()) == []
    assert library.registers_operators


def test_no_library_is_needed_that_a_host_may_lack(library: elf.Elf):
    """The CUDA runtime is inside: a host has that of CUDA 12 or of 13, or only its torch's."""
    assert not [name for name in library.needed if name.startswith(("libcuda", "libc10", "libtorch_cuda"))]
    assert not [need for need in library.host_needs if not need.startswith(("GLIBC_", "GLIBCXX_"))]


def test_the_list_of_symbols_is_sorted_and_says_what_it_is():
    header, *symbols = (ROOT / "exportkit" / "package" / "stable_abi_2.11.txt").read_text().splitlines()
    assert header.startswith("#")
    assert symbols == sorted(set(symbols))
    assert all(re.fullmatch(r"(aoti_)?torch_\w+", symbol) for symbol in symbols)


def test_the_build_targets_the_oldest_torch_that_is_declared():
    """The macro is what keeps an API newer than 2.11 out at compile time."""
    assert 'TARGET_TORCH = "0x020b000000000000"' in (ROOT / "setup.py").read_text()
    assert '"torch>=2.11"' in (ROOT / "pyproject.toml").read_text()


def test_one_wheel_serves_every_python(tmp_path: Path):
    """Built from one operator's sources, since the tag does not depend on how many there are."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text("exportkit\n")
    shutil.copytree(ROOT / "csrc" / "common", tmp_path / "csrc" / "common")
    shutil.copytree(ROOT / "csrc" / "ops" / "compute_entropy", tmp_path / "csrc" / "ops" / "compute_entropy")
    shutil.copytree(ROOT / "exportkit", tmp_path / "exportkit", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=tmp_path,
        env=os.environ | {"EXPORTKIT_CUDA": "0"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(r"exportkit-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "exportkit/lib/libarr_coc_cpu.so" in names
    assert "exportkit/package/stable_abi_2.11.txt" in names
    assert "exportkit/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "csrc/"))]
