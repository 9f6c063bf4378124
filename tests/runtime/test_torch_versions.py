"""One package, several torch versions: what a manifest says of them is what happens there.

EXPORTKIT_TORCH_PYTHONS lists interpreters, with colons between, that have another torch, and msgspec, safetensors,
numpy and pyelftools; exportkit they get from here. Such as:

    python3.11 -m venv torch-2.11 && torch-2.11/bin/pip install torch==2.11.0 msgspec safetensors numpy pyelftools
    EXPORTKIT_TORCH_PYTHONS=torch-2.11/bin/python python -m pytest tests/runtime/test_torch_versions.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from exportkit.arr_coc import LIBRARIES
from exportkit.package.archive import PackageReader
from exportkit.package.elf import oldest_torch, read_elf
from exportkit.runtime import targets
from tests.runtime import tiny
from tests.subprocesses import ROOT, output_of

PYTHONS = [path for path in os.environ.get("EXPORTKIT_TORCH_PYTHONS", "").split(os.pathsep) if path]
pytestmark = pytest.mark.skipif(not PYTHONS, reason="EXPORTKIT_TORCH_PYTHONS names no interpreter with another torch")
GOLDEN = ROOT / "tests" / "golden" / "format-1-cpu.pt2"
MINOR = ".".join(torch.__version__.split(".")[:2])

REPLAY = """
import json, sys, torch, exportkit
from exportkit.errors import ExportkitError
from exportkit.package.structure import flatten
def leaves(value):
    return flatten(value, torch.is_tensor)[1]

try:
    with exportkit.load(sys.argv[1], device="cpu") as model:
        for case in model.cases:
            got = model(*case.args, **case.kwargs)
            torch.testing.assert_close(leaves(got), leaves(case.outputs), rtol=1e-4, atol=1e-5)
        print(json.dumps({"ran": len(model.cases)}))
except ExportkitError as error:
    print(json.dumps({"refused": type(error).__name__, "message": str(error), "exit_code": error.exit_code}))
"""
# Whether the dynamic linker finds every symbol that a file asks for, all of them at once, beside this torch.
LINK = """
import ctypes, json, os, sys, torch
try:
    ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)
    print(json.dumps(None))
except OSError as error:
    print(json.dumps(str(error)))
"""


class Other(NamedTuple):
    python: str
    torch: str

    @property
    def minor(self) -> tuple[int, ...]:
        return tuple(map(int, self.torch.split(".")[:2]))

    def run(self, code: str, *args: object, cwd: Path, **environment: str) -> Any:
        """The JSON that the code printed last."""
        everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        said = output_of(self.python, "-c", code, *map(str, args), cwd=cwd, env=everything)
        return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module", params=PYTHONS)
def other(request: pytest.FixtureRequest) -> Other:
    version = output_of(request.param, "-c", "import torch; print(torch.__version__)")
    return Other(request.param, version.strip())


class Volumes(torch.nn.Module):
    """Calls a shim that torch 2.11 does not have."""

    def forward(self, volume: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grid_sample(volume, grid, align_corners=False)


@pytest.fixture(scope="module")
def volumes() -> dict[str, Path]:
    return tiny.compiled(Volumes(), (torch.randn(1, 2, 3, 4, 5), torch.rand(1, 2, 2, 2, 3)), None)


@pytest.fixture(scope="module")
def packages(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_package: Path,
    patches_package: Path,
    softpool_package: Path,
    volumes: dict[str, Path],
) -> dict[str, Path]:
    """Made with the torch that is installed here, but for the golden one."""
    folder = tmp_path_factory.mktemp("versions")
    needs = oldest_torch(read_elf(code_of(volumes)).torch_symbols) or MINOR
    tiny.write(folder / "volumes.pt2", volumes, targets=(tiny.target(needs_torch=needs),))
    return {
        "no operators": tiny_package,
        "stable operators": patches_package,
        "operators of one torch": softpool_package,
        "a new shim": folder / "volumes.pt2",
        "golden": GOLDEN,
    }


def code_of(files: dict[str, Path]) -> Path:
    return next(file for name, file in files.items() if name.endswith(".so"))


def predicted(path: Path, other: Other) -> str | None:
    """What the manifest says will become of the package there: the error's name, None if it runs."""
    with PackageReader(path) as reader:
        manifest = reader.manifest
    host = targets.host(with_cuda=False)._replace(torch=other.torch)
    if not targets.survey(manifest.targets, "cpu", host).fitting:
        return "NoTargetError"
    if any(targets.library_rejection(library, other.torch) for library in manifest.libraries):
        return "TorchVersionError"
    return None


@pytest.mark.parametrize("name", ["no operators", "stable operators", "operators of one torch", "a new shim", "golden"])
def test_a_package_runs_or_is_refused_as_its_manifest_says(other: Other, packages, name, tmp_path):
    expected = predicted(packages[name], other)
    got = other.run(REPLAY, packages[name], cwd=tmp_path, EXPORTKIT_CACHE=str(tmp_path / "cache"))
    if expected is None:
        assert "ran" in got, got
    else:
        assert (got.get("refused"), got.get("exit_code")) == (expected, 4), got
        assert f"torch {other.torch}" in got["message"] or f"this is {other.torch}" in got["message"]
    if name in ("no operators", "stable operators", "golden"):
        assert expected is None, "what uses the stable ABI and old shims runs everywhere"
    if name == "operators of one torch" and other.minor != tuple(map(int, MINOR.split("."))):
        assert expected == "TorchVersionError"


def test_what_the_symbols_predict_is_what_the_dynamic_linker_finds(
    other: Other, packages, volumes, tiny_files, tmp_path
):
    """The oracle is the other torch itself: it opens every file, resolving all that the file asks for."""
    files = {"tiny": code_of(tiny_files), "volumes": code_of(volumes), "arr_coc": LIBRARIES["cpu"]}
    for name, file in files.items():
        said = other.run(LINK, file, cwd=tmp_path)
        oldest = oldest_torch(read_elf(file).torch_symbols)
        if oldest == "2.11":
            assert said is None, (name, said)
        elif other.minor == (2, 11):
            assert said is not None, name
            assert "undefined symbol" in said, (name, said)
