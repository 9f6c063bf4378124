"""A package with an operator of each kind, as `exportkit ops new` writes it, compiled once for all tests."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

from exportkit.operators.scaffold.new_operator import KINDS, NewOperator, write_operator
from exportkit.package import elf
from tests.artifacts import ROOT
from tests.made_once import one_maker
from tests.subprocesses import output_of

PACKAGE = "scaffolded_ops"
INSTALLED = "installed_ops"
OPERATORS = {f"new_{kind}": kind for kind in KINDS}
_CACHE = (ROOT / ".cache").resolve() / "scaffolded"
_TORCH = Path(torch.__file__).parent


def imported(name: str, path: Path) -> ModuleType:
    """A file as a module with a name of its own."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def write_package(folder: Path) -> Path:
    """Writes the package, an operator of each kind in it."""
    for name, kind in OPERATORS.items():
        write_operator(NewOperator(name, PACKAGE, kind, folder))
    return folder / PACKAGE


def _key(folder: Path) -> str:
    texts = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
    return hashlib.sha256(repr((texts, torch.__version__)).encode()).hexdigest()[:16]


def built_package(temporary: Path) -> Path:
    """The package, built."""
    folder = _CACHE / _key(write_package(temporary)) / PACKAGE
    with one_maker(folder / "first.log") as ours:
        if ours:
            shutil.copytree(temporary / PACKAGE, folder, dirs_exist_ok=True)
            build_in_place(folder)
    return folder


def build_in_place(folder: Path, **environment: str) -> None:
    """Runs the folder's setup.py. What the compilers say is in first.log, which a build that failed does not write."""
    said = folder / "first.part"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    with said.open("w") as file:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    assert done.returncode == 0, said.read_text()
    said.rename(folder / "first.log")


def installed_package(temporary: Path) -> Path:
    """The folder that pip installed a package with one operator into. The package's model is there, too."""
    write_operator(NewOperator("halved", INSTALLED, "elementwise", temporary))
    folder = _CACHE / _key(temporary) / "installed"
    with one_maker(folder) as ours:
        if ours:
            unfinished = folder.with_suffix(".part")
            flags = ["--no-deps", "--no-build-isolation", "--target", str(unfinished)]
            command = [sys.executable, "-m", "pip", "install", "--quiet", *flags, str(temporary / INSTALLED)]
            output_of(*command)
            shutil.copy(temporary / INSTALLED / "halved_model.py", unfinished)
            unfinished.rename(folder)
    return folder


def compiled_for_cuda(package: Path) -> Path:
    """An object with the CUDA kernels of a package, compiled by nvcc in one run: torch's headers take the time."""
    compiled = package / "cuda.o"
    with one_maker(compiled) as ours:
        if ours:
            sources, unfinished = package / "cuda.cpp", compiled.with_suffix(".part")
            sources.write_text("".join(f'#include "csrc/{path.name}"\n' for path in sorted(package.glob("csrc/*.cu"))))
            flags = [
                "-std=c++17",
                "-DUSE_CUDA",
                "-DTORCH_TARGET_VERSION=0x020b000000000000",
                "-Xcicc=-O0",
                "-Xptxas=-O0",
            ]
            flags += ["-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings", "-gencode=arch=compute_90,code=sm_90"]
            flags += ["-isystem", str(_TORCH / "include"), f"-I{package / 'csrc'}", "-c", "-x", "cu"]
            command = ["nvcc", *flags, str(sources), "-o", str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert "warning" not in done.stderr, done.stderr
            unfinished.replace(compiled)
    return compiled


def check_needs(library: Path) -> None:
    """Asserts that a library of operators needs the stable ABI of torch 2.11, and no Python."""
    found = elf.read_elf(library)
    assert found.registers_operators
    assert elf.is_stable(found.undefined)
    assert found.torch_symbols <= elf.stable_abi()
    assert not [name for name in found.undefined if name.startswith(("Py", "_Py"))]
