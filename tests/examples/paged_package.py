"""The operator library of examples/paged_cache, built once for all tests."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch

from tests.artifacts import ROOT
from tests.made_once import one_maker
from tests.operators.scaffold.scaffolded import build_in_place

SOURCE = ROOT / "examples" / "paged_cache"
_CACHE = (ROOT / ".cache").resolve() / "paged_cache"
_FILES = ("setup.py", "csrc/*", "paged_cache/*.py", "paged_model.py")


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
            build_in_place(folder, EXPORTKIT_CUDA="1" if cuda else "0")
    return folder
