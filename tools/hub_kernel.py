"""Builds a kernel of the Hugging Face hub's form for the CPU, from its sources.

    python -m tools.hub_kernel PROJECT -o FOLDER

PROJECT is a folder with a build.toml, such as `relu` in a clone of huggingface/kernels-community. FOLDER becomes a
kernel repository, with the one variant that this torch and this machine need. Its namespace has a hash of the sources,
as the hub's builder makes it. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exportkit.libraries import host_platform

# The header that the hub's builder adds to a project: kernels include it under this name, for these two macros.
_REGISTRATION = """#pragma once
#include <Python.h>
#define EK_JOIN_(a, b) a##b
#define EK_JOIN(a, b) EK_JOIN_(a, b)
#define EK_TEXT_(a) #a
#define EK_TEXT(a) EK_TEXT_(a)
#define TORCH_LIBRARY_EXPAND(name, module) TORCH_LIBRARY(name, module)
#define REGISTER_EXTENSION(name)                                                           \\
  PyMODINIT_FUNC EK_JOIN(PyInit_, name)() {                                                \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, EK_TEXT(name), nullptr, 0, nullptr}; \\
    return PyModule_Create(&module);                                                       \\
  }
"""
_OPS = """import torch

from . import {name}

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{name}::{{op_name}}"
"""


def build(project: Path, folder: Path) -> Path:
    """Builds the CPU kernels of a project.

    Args:
        project: The folder with build.toml.
        folder: The kernel repository to make.

    Returns:
        The variant's folder, a Python package.

    Raises:
        RuntimeError: The project has no CPU kernels, or the compiler refused a source.
    """
    described = importlib.import_module("tomllib").loads((project / "build.toml").read_text())
    kernels = [kernel for kernel in described["kernel"].values() if kernel.get("backend") == "cpu"]
    if not kernels:
        raise RuntimeError(f"{project} has no kernels for the CPU")
    kernel_name = described["general"]["name"].replace("-", "_")
    name = f"_{kernel_name}_cpu_{_digest(project)[:7]}"
    version = "".join(torch.__version__.split(".")[:2])
    variant = folder / "build" / f"torch{version}-cxx11-cpu-{'-'.join(reversed(host_platform().split('-')))}"
    shutil.copytree(project / "torch-ext" / kernel_name, variant, dirs_exist_ok=True)
    (variant / "_ops.py").write_text(_OPS.format(name=name))
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "registration.h").write_text(_REGISTRATION)
        parts: list[Mapping[str, Any]] = [*kernels, {"src": described["torch"]["src"], "include": ["torch-ext"]}]
        objects = [
            built
            for number, part in enumerate(parts)
            for built in _compile(project, part, name, Path(temporary), str(number))
        ]
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        _run(["g++", "-shared", "-fopenmp", *objects, "-o", variant / f"{name}.abi3.so", *libraries])
    return variant


def _compile(project: Path, part: Mapping[str, Any], name: str, folder: Path, prefix: str) -> list[Path]:
    """Compiles the sources of one part of a project, with the part's own flags."""
    headers = Path(torch.__file__).parent / "include"
    includes = [project, folder, *(project / each for each in part.get("include", ()))]
    includes += [headers, headers / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    flags = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", *part.get("cxx-flags", ()), *(f"-I{each}" for each in includes)]
    flags += ["-DCPU_KERNEL", f"-DTORCH_EXTENSION_NAME={name}", "-DPy_LIMITED_API=0x03090000"]
    objects = []
    for source in (source for source in part["src"] if source.endswith(".cpp")):
        objects.append(folder / f"{prefix}-{Path(source).stem}.o")
        _run(["g++", *flags, "-c", project / source, "-o", objects[-1]])
    return objects


def _run(command: Sequence[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-20:]))


def _digest(project: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in project.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path, metavar="PROJECT", help="a folder with a build.toml")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the repository to make")
    options = parser.parse_args()
    print(build(options.project, options.output))
