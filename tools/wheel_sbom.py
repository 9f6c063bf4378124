"""The SBOM of the wheel, which setup.py puts into its dist-info/sboms (PEP 770)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import runpy
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def wheel_sbom(content: Path, version: str, license: str, requires: Sequence[str], nvcc: str | None) -> bytes:
    """Returns the SBOM of what a wheel will have.

    Args:
        content: The folder with the wheel's files.
        version: The version of exportkit.
        license: Its SPDX expression.
        requires: The distributions that it needs, as in its metadata.
        nvcc: The compiler of the CUDA kernels; None: the wheel has none.
    """
    # The package itself cannot be imported where it is built: what it needs is not there.
    spdx: dict[str, Any] = runpy.run_path(str(_ROOT / "exportkit" / "spdx.py"))
    component = spdx["Component"]
    whole = component("exportkit", version, pypi=True, license=license)
    parts, digests = [], hashlib.sha256()
    for file in sorted(path for path in content.rglob("*") if path.is_file() and _is_elf(path)):
        name, sha256 = file.relative_to(content).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()
        digests.update(f"{name} {sha256}\n".encode())
        parts.append(component(file.name, sha256=sha256, file=name, license=license))
        if nvcc is not None and file.name.endswith("_cuda.so"):
            parts.append(component("CUDA runtime", _version(nvcc), comment=f"linked into {name}"))
    for requirement in requires:
        name, _, extra = requirement.partition(";")
        if "extra" not in extra:
            bare = name.strip().split(">")[0].split("=")[0].split("<")[0].strip()
            parts.append(component(bare, pypi=True, comment=name.strip(), relation="RUNTIME_DEPENDENCY_OF"))
    tool = {"purpose": "APPLICATION", "relation": "BUILD_TOOL_OF"}
    parts.append(component("g++", _version("g++"), **tool))
    if nvcc is not None:
        parts.append(component("nvcc", _version(nvcc), **tool))
    for name in ("torch", "setuptools"):
        parts.append(component(name, importlib.metadata.version(name), pypi=True, **tool))
    return bytes(
        spdx["document"](whole, parts, tool=f"exportkit-{version}", identity=f"{version}-{digests.hexdigest()}")
    )


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _version(compiler: str) -> str:
    """Returns a compiler's version: the last line of `nvcc --version`, the first of `g++ --version`."""
    program = os.environ.get("CXX", compiler) if compiler == "g++" else compiler
    said = (
        subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()
    )
    line = next((each for each in said if "release" in each), said[0])
    return line.split(", V")[-1] if "release" in line else line.split(")")[-1].strip()
