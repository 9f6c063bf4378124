"""The operator library of examples/paged_cache, built once for all tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from exportkit.operators.scaffold.build_library import build_folder
from tests.artifacts import ROOT
from tests.made_once import one_maker

SOURCE = ROOT / "examples" / "paged_cache"
_CACHE = (ROOT / ".cache").resolve() / "paged_cache"
_FILES = ("setup.py", "csrc/*", "paged_cache/*.py", "paged_model.py")
_COMPILER = ["nvcc", "-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-Xcicc=-O0",
             "-Xptxas=-O0", "-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings",
             "-gencode=arch=compute_90,code=sm_90"]  # fmt: skip


def _sources() -> list[Path]:
    return sorted(path for pattern in _FILES for path in SOURCE.glob(pattern))


def built_package() -> Path:
    """The folder, built for this torch: with CUDA kernels where torch has a GPU for them."""
    cuda = torch.cuda.is_available()
    texts = {path.name: path.read_text() for path in _sources()}
    key = hashlib.sha256(repr((texts, torch.__version__, cuda)).encode()).hexdigest()[:16]
    folder = _CACHE / key / SOURCE.name
    with one_maker(folder / "first.log") as ours:
        if ours:
            for path in _sources():
                target = folder / path.relative_to(SOURCE)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
            _build(folder, "1" if cuda else "0")
            (folder / "build" / "exportkit.log").rename(folder / "first.log")
    return folder


def _build(folder: Path, cuda: str) -> None:
    before = os.environ.get("EXPORTKIT_CUDA")
    os.environ["EXPORTKIT_CUDA"] = cuda
    try:
        build_folder(folder)
    finally:
        if before is None:
            del os.environ["EXPORTKIT_CUDA"]
        else:
            os.environ["EXPORTKIT_CUDA"] = before


def compiled_for_cuda(package: Path) -> Path:
    """An object with the CUDA kernels, compiled by nvcc in one run: torch's headers take the time."""
    compiled = package / "cuda.o"
    with one_maker(compiled) as ours:
        if ours:
            both, unfinished = package / "cuda.cu", compiled.with_suffix(".part")
            both.write_text("".join(f'#include "csrc/{path.name}"\n' for path in sorted(package.glob("csrc/*.cu"))))
            headers = ["-isystem", str(Path(torch.__file__).parent / "include"), f"-I{package / 'csrc'}"]
            command = [*_COMPILER, *headers, "-c", str(both), "-o", str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            unfinished.replace(compiled)
    return compiled
