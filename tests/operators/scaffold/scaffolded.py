"""A package with an operator of each kind, as `exportkit ops new` writes it, compiled once for all tests."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import setuptools
import torch

from exportkit.operators.scaffold.build_library import build_folder
from exportkit.operators.scaffold.new_operator import KINDS, NewOperator, write_operator
from tests.artifacts import ROOT
from tests.made_once import one_maker

PACKAGE = "scaffolded_ops"
OPERATORS = {f"new_{kind}": kind for kind in KINDS}
_CACHE = ROOT / ".cache" / "scaffolded"
_TORCH = Path(torch.__file__).parent


def write_package(folder: Path) -> Path:
    """Writes the package, an operator of each kind in it."""
    for name, kind in OPERATORS.items():
        write_operator(NewOperator(name, PACKAGE, kind, folder))
    return folder / PACKAGE


def write_into_checkout(folder: Path) -> Path:
    """Copies what operators need of exportkit's sources, and writes an operator of each kind into them."""
    shutil.copytree(ROOT / "csrc" / "common", folder / "csrc" / "common")
    (folder / "csrc" / "arr_coc").mkdir(parents=True)
    (folder / "exportkit" / "ops").mkdir(parents=True)
    shutil.copy(ROOT / "exportkit" / "ops" / "_call.py", folder / "exportkit" / "ops")
    for name, kind in OPERATORS.items():
        write_operator(NewOperator(name, None, kind, folder / "csrc"))
    return folder


def _key(folder: Path) -> str:
    texts = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
    return hashlib.sha256(repr((texts, torch.__version__)).encode()).hexdigest()[:16]


def built_package(temporary: Path) -> Path:
    """The package, built."""
    folder = _CACHE / _key(write_package(temporary)) / PACKAGE
    with one_maker(folder / "first.log") as ours:
        if ours:
            shutil.copytree(temporary / PACKAGE, folder, dirs_exist_ok=True)
            build_folder(folder)
            (folder / "build" / "exportkit.log").rename(folder / "first.log")  # a later build compiles nothing
    return folder


def built_in_checkout(temporary: Path) -> tuple[Path, Path]:
    """A checkout with new operators, and a library of these alone, compiled as setup.py compiles the others."""
    write_into_checkout(temporary)
    folder = _CACHE / _key(temporary)
    library = folder / "libnew.so"
    with one_maker(library) as ours:
        if ours:
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
            sources = [folder / "csrc" / "ops" / name / f"{name}.cpp" for name in OPERATORS]
            flags = setup_flags(folder)["CXX_FLAGS"]
            unfinished = library.with_suffix(".part")
            link = ["-shared", f"-L{_TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
            compile_together(["g++", *flags, "-Werror", *link, "-x", "c++"], sources, unfinished)
            unfinished.replace(library)
    return folder, library


def compiled_for_cuda(folder: Path, sources: Iterable[Path], includes: Path) -> Path:
    """An object with the CUDA kernels, compiled by nvcc as `EXPORTKIT_CUDA=check` does."""
    compiled = folder / "cuda.o"
    with one_maker(compiled) as ours:
        if ours:
            names = setup_flags(includes.parent)
            flags = [*names["NVCC_FLAGS"], *names["NVCC_QUICK"], "-Xcompiler=-Wall", "-Werror=all-warnings"]
            unfinished = compiled.with_suffix(".part")
            target = "-gencode=arch=compute_90,code=sm_90"
            compile_together(["nvcc", *flags, f"-I{includes}", target, "-c", "-x", "cu"], sources, unfinished)
            unfinished.replace(compiled)
    return compiled


def compile_together(command: list[str], sources: Iterable[Path], output: Path) -> None:
    """Compiles sources in one run, because most of the time goes into torch's headers."""
    together = output.with_name(f"{output.stem}.cpp")
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    done = subprocess.run([*command, str(together), "-o", str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr


def setup_flags(root: Path) -> dict[str, Any]:
    """The names of our setup.py, with `root` as the folder of the sources."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        with mock.patch.object(setuptools, "setup"):
            names = runpy.run_path("setup.py")
    finally:
        os.chdir(before)
    for flags in ("CXX_FLAGS", "NVCC_FLAGS"):
        names[flags] = [flag.replace(str(ROOT / "csrc"), str(root / "csrc")) for flag in names[flags]]
    return names
