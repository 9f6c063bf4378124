"""The packages of the examples, made once by the commands that their READMEs show."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.artifacts import ROOT
from tests.examples.paged_package import built_package
from tests.fixtures.stable_library import build_with_aten
from tests.made_once import one_maker
from tests.subprocesses import run_python

EXAMPLES = ROOT / "examples"
_CACHE = (ROOT / ".cache").resolve() / "examples"
_SCRIPT = """
import sys
from exportkit.cli import main
model, device, exported, packaged, library = sys.argv[1:]
libraries = ["--op-library", library] if library else []
sys.exit(
    main(["export", model, "--device", device, "-o", exported, *libraries])
    or main(["package", exported, "--model", model, "-o", packaged, *libraries])
)
"""


@dataclass(frozen=True)
class Example:
    """A folder of examples/, a model in it, whether it calls the paged cache's operators, and a source of others."""

    folder: str
    spec: str
    paged: bool = False
    library: str = ""

    def model(self) -> str:
        """MODEL, for the command line."""
        folder = built_package() if self.paged else EXAMPLES / self.folder
        return f"{folder / self.spec}"

    def operators(self) -> Path | None:
        """--op-library."""
        return build_with_aten(Path(__file__).with_name(self.library)) if self.library else None


NAMED = {
    "speech": Example("speech", "exportkit_speech/detector.py:spec"),
    "llama": Example("llama", "llama.py:spec"),
    "llm": Example("llm", "llm.py:spec"),
    "paged": Example("paged_cache", "paged_model.py:spec", paged=True),
    "paged-written": Example("paged_cache", "paged_model.py:written", paged=True),
    "vllm": Example("vllm", "decoder.py:spec", library="vllm_on_cpu.cpp"),
}


def made(name: str, device: str = "cpu") -> Path:
    """The package of an example; made if it is not in the cache."""
    example = NAMED[name]
    if example.folder == "speech":
        require_weights()
    path = _CACHE / _key(example, device) / f"{name}.pt2"
    with one_maker(path) as ours:
        if ours:
            exported, packaged = path.with_name("exported.pt2"), path.with_name("packaged.pt2")
            search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            if example.paged:
                search.insert(0, str(built_package()))
            environment = {"PYTHONPATH": os.pathsep.join(search)}
            arguments = (example.model(), device, exported, packaged, example.operators() or "")
            run_python(_SCRIPT, *arguments, cwd=ROOT, compiler=True, **environment)
            exported.unlink()
            packaged.replace(path)
    return path


def require_weights() -> None:
    """Skips the test where silero-vad is not installed."""
    if importlib.util.find_spec("silero_vad") is None:
        pytest.skip("silero-vad is not installed: pip install 'exportkit[examples]'")


def _key(example: Example, device: str) -> str:
    digest = hashlib.sha256(repr((example, device, torch.__version__, example.operators())).encode())
    parts = ("export", "package", "recurrent", *(["transformers"] if example.folder == "llm" else []))
    folders = [ROOT / "exportkit" / part for part in parts]
    folders += [EXAMPLES / example.folder] if example.paged else []
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES}
    for file in sorted({EXAMPLES / example.folder / example.spec.partition(":")[0], *found}):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


_SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh"}
